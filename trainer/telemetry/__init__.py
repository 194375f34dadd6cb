"""What a run reports while it trains: numbers, progress and where its time goes."""
