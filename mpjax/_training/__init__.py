"""What a train step checks, splits, keeps and reports."""
