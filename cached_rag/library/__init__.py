"""The known chunks: finding them in prompts, planning what is reused, encoding and learning."""
