"""Code that several test modules share: reference implementations, tiny models and data. It contains no tests."""
