"""How they get there: local programs, partition rules, resharding."""
