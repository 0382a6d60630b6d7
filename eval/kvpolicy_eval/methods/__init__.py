"""What each method does to the embedded model's answers, measured for the method's page of the docs."""
