"""Uploads a run to the Hugging Face hub as a model: `pipejax push`."""
