"""A meter of dependence: how much the rows of a target need one another, and how much of that a Δt leaves."""
