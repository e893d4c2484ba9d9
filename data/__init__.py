"""Data tools: text or published shards in, checked shards and their tokenizer out; see README.md."""
