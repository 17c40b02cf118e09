"""The paper's Tables 1 to 5 and Figures 4 and 5, measured anew beside the paper's own numbers."""
