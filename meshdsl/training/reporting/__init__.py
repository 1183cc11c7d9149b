"""What a run reports while it trains: metrics, meters, profiles."""
