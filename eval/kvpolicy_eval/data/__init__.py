"""Words, texts and prompts shared by the training of the embedded model and by the evaluation tasks."""
