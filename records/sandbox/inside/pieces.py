"""Runs inside the sandbox: opens a record's own tokenizer and answers one question, in a process of its own.

    python pieces.py FOLDER MEMORY

FOLDER holds tokenizer.model and question.json, a list whose first word names the question. The answer is left
in the memory file of that number, as JSON. A parser that a file can break breaks here.
"""

import json
import os
import sys
from pathlib import Path

import sentencepiece

CONTROL, BYTE, TEXT = 0, 1, 2  # kinds of pieces


def kind(tokenizer: sentencepiece.SentencePieceProcessor, token: int) -> int:
    if tokenizer.is_control(token):
        return CONTROL
    return BYTE if tokenizer.is_byte(token) else TEXT


def facts(tokenizer: sentencepiece.SentencePieceProcessor) -> dict:
    """What it says of itself."""
    ids = range(tokenizer.vocab_size())
    pieces = [[tokenizer.id_to_piece(token), kind(tokenizer, token)] for token in ids]
    return {"bos": tokenizer.bos_id(), "pieces": pieces}


def main() -> None:
    folder, memory = Path(sys.argv[1]), int(sys.argv[2])
    what, *given = json.loads((folder / "question.json").read_text("utf-8"))
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    if what == "facts":
        answer = facts(tokenizer)
    else:
        work = tokenizer.encode if what == "encode" else tokenizer.decode
        answer = work(given[0], num_threads=1)
    with os.fdopen(memory, "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
