"""Commands that measure speed beside other systems."""
