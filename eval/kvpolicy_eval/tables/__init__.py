"""Commands that print the measured tables of the documentation, and put them into its pages."""
