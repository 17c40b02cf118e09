"""Plans the memory of a training for devices that need not be here: `pipejax plan`."""
