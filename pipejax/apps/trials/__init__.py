"""Lists and removes the verdicts of trials on GPUs: `pipejax trials`."""
