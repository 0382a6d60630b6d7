"""Words, texts and prompts of the tasks, which the evaluation and the training of the embedded model use too."""
