"""Words, texts and prompts that the training of the embedded model and the evaluation tasks share."""
