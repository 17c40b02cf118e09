"""The paper's Tables 1 to 5 and Figures 4 and 5, measured again, with the numbers of the paper for comparison."""
