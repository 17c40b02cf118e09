"""The published data sets of the paper, as tasks, and their preparation: `pipejax data prepare`."""
