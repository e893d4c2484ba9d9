"""A development text out of the demo's training shard, as on the device machine there is room for one only."""
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from data import shards
S = Path("data/datasets/demo_sp1024"); D = Path("data/datasets/dev_sp1024"); D.mkdir(exist_ok=True)
tok = shards.Tokenizer(Path("data/tokenizers/demo_1024_bpe.model"))
tokens = shards.read_split(S, "train")
starts = np.flatnonzero(tokens == tok.bos_id)
cut = int(starts[starts < len(tokens) - 800_000][-1])
for split, part, src in (("train", tokens[:cut], "demo_train_000000.bin"), ("val", tokens[cut:], "demo_val_000000.bin")):
    head = shards.read_header(S / src)
    ends = np.flatnonzero(part == tok.bos_id)[1:]
    docs = np.split(part, ends)
    empty = replace(head, tokens=0, documents=0, text_bytes=0, max_id=0, crc32=0)
    shards.write_shard(D / f"dev_{split}_000000.bin", empty, ((p, tok.text_bytes(p), False) for p in docs))
    print(split, shards.read_header(D / f"dev_{split}_000000.bin").tokens)
m = json.loads((S / "manifest.json").read_text()); (D / "manifest.json").write_text(json.dumps(m))
