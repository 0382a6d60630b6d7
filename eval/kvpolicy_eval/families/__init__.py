"""Every causal and image-text class of transformers under a policy, compared with a masked stock model."""
