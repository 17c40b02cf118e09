"""Commands that measure the speed of pipejax and of other systems."""
