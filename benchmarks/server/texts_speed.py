"""How many texts a minute a server embeds, with so many texts a request.

    python -m benchmarks.server.texts_speed configs/shapes/bert-base [--device cuda:0] [--texts 64] [--clients 8]

Weights are random. The tokenizer is WordPiece of 30,522 words, made here. Clients are processes, so that none waits for
another's Python; each keeps one connection, sends one request behind another, and reads the answer in base64, as
OpenAI's client asks for it. A round's rate counts the texts of all clients, from the first request to the last answer.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from benchmarks.script import parser_of, positive, positives, processes_of, told_in_one_line
from benchmarks.server.switch_speed import served
from benchmarks.server.texts_cost import WORDS

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_VOCABULARY = 30522
_LIMIT_S = 120.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="a folder with a config.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--texts", type=positive, default=64, help="of a request")
    parser.add_argument("--tokens", type=positive, default=32, help="of a text, two special ones among them")
    parser.add_argument("--clients", type=positives, default=[1, 8])
    parser.add_argument("--requests", type=positive, default=40, help="of each client in a round")
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        shutil.copy(args.model / "config.json", folder)
        save_word_pieces(folder)
        config = Path(scratch, "config.yaml")
        told = {
            "model": {"path": str(folder), "dtype": args.dtype, "load_format": "dummy", "task": "embed"},
            "runtime": {"device": args.device},
            "compile": {"backend": args.backend},
        }
        config.write_text(json.dumps(told))  # which is YAML too
        with served([str(config)], []) as server:
            server.wait()
            most = max(args.clients)
            with processes_of(most, "spawn") as pool:
                given = args.texts, args.tokens, args.requests
                list(pool.map(ask, *zip(*[(server.port, number, *given) for number in range(most)], strict=True)))
                for count in args.clients:
                    asked = [(server.port, number, *given) for number in range(count)]
                    rates = [rate_of(pool, asked) for _ in range(args.rounds)]
                    print(
                        f"{count} clients, {args.texts} texts of {args.tokens} tokens a request: "
                        f"{60 * statistics.median(rates):,.0f} texts a minute "
                        f"({60 * min(rates):,.0f} to {60 * max(rates):,.0f})"
                    )


def rate_of(pool: ProcessPoolExecutor, asked: list[tuple[int, int, int, int, int]]) -> float:
    """Texts a second of all clients together."""
    spans = list(pool.map(ask, *zip(*asked, strict=True)))
    _, _, texts, _, requests = asked[0]
    return len(asked) * requests * texts / (max(end for _, end in spans) - min(begin for begin, _ in spans))


def ask(port: int, number: int, texts: int, tokens: int, requests: int) -> tuple[float, float]:
    """The times at which a client's first request begins and its last answer ends, by the machine's clock."""
    draws = random.Random(number)
    bodies, answer = [], b""
    for _ in range(requests):
        of_body = [" ".join(draws.choice(WORDS) for _ in range(tokens - 2)) for _ in range(texts)]
        bodies.append(json.dumps({"input": of_body, "encoding_format": "base64"}))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    connection.connect()
    begin = time.monotonic()  # one clock for all processes
    for body in bodies:
        connection.request("POST", "/v1/embeddings", body)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(answer[:300].decode(errors="replace"))
    end = time.monotonic()
    connection.close()
    count = len(json.loads(answer)["data"])
    if count != texts:
        raise SystemExit(f"the answer has {count} embeddings, not {texts}")
    return begin, end


def save_word_pieces(folder: Path) -> None:
    """Writes a tokenizer as BERT's: lower case, words and their pieces, [CLS] and [SEP] around a text."""
    names = dict.fromkeys((*_SPECIAL, *WORDS))
    filling = (f"##{number}" for number in range(_VOCABULARY - len(names)))
    vocabulary = {name: at for at, name in enumerate((*names, *filling))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    with told_in_one_line():
        main()
