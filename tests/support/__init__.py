"""What several test modules share: references to compare with, tiny models and data. No test is in here."""
