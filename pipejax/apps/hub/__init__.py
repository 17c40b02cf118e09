"""Shares a run as a model of the Hugging Face hub: `pipejax push`."""
