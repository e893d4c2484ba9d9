"""The Hugging Face hub by its client: what both rooms that talk to it share."""
