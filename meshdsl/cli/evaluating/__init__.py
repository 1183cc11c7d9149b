"""What `meshdsl evaluate` asks a trained model beside its loss."""
