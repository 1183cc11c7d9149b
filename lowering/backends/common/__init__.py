"""What emits the same in several frameworks, written once over the names of the array API."""
