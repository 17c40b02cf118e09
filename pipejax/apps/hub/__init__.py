"""The model card of a converted run, and its upload to the Hugging Face hub: `pipejax push`."""
