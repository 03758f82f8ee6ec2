"""Trains the embedded vision model: a small Qwen3-VL with its tokenizer and processor, from nothing, with no network.

    python examples/tiny_models/train_vision.py                                   # the real one; needs Pillow
    python examples/tiny_models/train_vision.py --minutes 3 --out /tmp/vision     # a rough one, to try the script
    python examples/tiny_models/train_vision.py --device cuda --minutes 2 --batch 256 --workers 12 --learning-rate 3e-3

Without --out it replaces the embedded model. vision_pictures.py draws what it learns from; pictures whose seeds are
held out measure it, read back from the folder through its own processor and Transformers' generate.

Shape legend: B pictures of a batch, T tokens of the longest of their chats, V patches of all pictures.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
)
from vision_pictures import CELL, HELD_OUT, SIDES, ask, describe, draw_picture, held_out

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, VISION_START, VISION_END, IMAGE, VIDEO)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_SIZE = 384
MAX_POSITIONS = 1024
PATCH, MERGE = 8, 2  # so that a token of a picture is a cell
QUESTIONS = 4  # about one picture, in one chat; the last one asks for all of it, as others may not read its answer
SEED = 0
# Scales pictures to the sizes that were trained on.
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": (min(SIDES) * CELL) ** 2, "longest_edge": (max(SIDES) * CELL) ** 2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer()
    model = Qwen3VLForConditionalGeneration(model_config(tokenizer))
    if args.go_on_from is not None:
        model.load_state_dict(load_file(args.go_on_from / "model.safetensors"), strict=False)  # its head is tied
    model.to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    started = time.monotonic()
    steps = train(model, tokenizer, args)
    seconds = time.monotonic() - started
    save(model, tokenizer, args.out)
    card = measure(args.out, args, f"{steps} steps", f"{args.device} ({platform.machine()}), {seconds:.0f} s")
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded vision model.")
    default_out = Path(__file__).resolve().parents[2] / "mllm_compile/model/tiny_vision"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--minutes", type=float, default=40.0, help="of training")
    parser.add_argument("--go-on-from", type=Path, help="a folder whose weights are trained on")
    parser.add_argument("--first-step", type=int, default=0, help="steps whose pictures those weights have seen")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=0, help="processes that draw; 0: this one")
    parser.add_argument("--batch", type=int, default=32, help="pictures a step")
    parser.add_argument("--pictures", type=int, default=200, help="held-out pictures that measure it, with Pillow")
    return parser.parse_args()


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the questions and answers; any text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = ["user\n", "assistant\n"]
    for seed in range(2000):
        picture = draw_picture(seed)
        texts += [*ask(picture, random.Random(seed)), *describe(picture)]
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[END_OF_TURN],
            "pad_token_id": ids[END_OF_TEXT],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 1,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": (max(SIDES) * MERGE) ** 2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )


def patches_of(pixels: np.ndarray) -> np.ndarray:
    """[patches, 3 * 2 * PATCH * PATCH] float32 of [height, width, 3]: what the processor gives, at a size it keeps."""
    height, width = (side // (PATCH * MERGE) for side in pixels.shape[:2])
    scaled = (pixels.astype(np.float32) / 255 - 0.5) / 0.5
    blocks = scaled.reshape(height, MERGE, PATCH, width, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    twice = np.repeat(blocks[:, :, :, :, :, None], 2, axis=5)  # a still picture fills both times of a patch
    return twice.reshape(height * width * MERGE**2, -1)


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Batches of pictures without repetition; the n-th is of the n-th seeds."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: Qwen3VLConfig, size: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        with torch.device("meta"):
            self._model = Qwen3VLModel(config)  # for positions alone

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = draw_batch(self._tokenizer, range(index * self._size, (index + 1) * self._size))
        batch["position_ids"], _ = self._model.get_rope_index(
            batch["input_ids"], batch["mm_token_type_ids"], image_grid_thw=batch["image_grid_thw"]
        )
        return batch


def draw_batch(tokenizer: PreTrainedTokenizerFast, seeds: range) -> dict[str, torch.Tensor]:
    """A chat about each seed's picture; `labels` [B, T] are -100 but for the answers."""
    pixels, grids, chats = [], [], []
    for seed in seeds:
        picture, rng = draw_picture(seed), random.Random(seed)
        patches = patches_of(picture.pixels)
        pixels.append(patches)
        rows, columns = (side // PATCH for side in picture.pixels.shape[:2])
        grids.append([1, rows, columns])
        placeholder = f"{VISION_START}{IMAGE * (rows * columns // MERGE**2)}{VISION_END}"
        turns = [*(ask(picture, rng) for _ in range(QUESTIONS - 1)), describe(picture)]
        chats.append(chat_of(turns, placeholder))
    # One call for all parts: told and answered texts of all chats in turn.
    encoded = iter(tokenizer([part for chat in chats for part in chat], add_special_tokens=False)["input_ids"])
    rows_of_ids = [[next(encoded) for _ in chat] for chat in chats]
    longest = max(sum(map(len, parts)) for parts in rows_of_ids)
    ids = torch.full((len(chats), longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, parts in enumerate(rows_of_ids):
        at = 0
        for index, part in enumerate(parts):
            ids[row, at : at + len(part)] = torch.tensor(part)
            if index % 2:
                labels[row, at : at + len(part)] = torch.tensor(part)
            at += len(part)
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.from_numpy(np.concatenate(pixels)),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids(IMAGE)).int(),
    }


def chat_of(turns: list[tuple[str, str]], placeholder: str) -> list[str]:
    """Questions and answers, in turn, as CHAT_TEMPLATE writes them."""
    parts = []
    for index, (question, answer) in enumerate(turns):
        before = "" if index == 0 else "\n"
        told = f"{before}{START_OF_TURN}user\n{'' if index else placeholder}{question}{END_OF_TURN}\n"
        parts += [f"{told}{START_OF_TURN}assistant\n", f"{answer}{END_OF_TURN}"]
    return parts


def train(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> int:
    """Trains for args.minutes, the learning rate by the clock; every picture is seen once. Returns the steps."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), fused=True)
    model.train()
    started, step, shown, total = time.monotonic(), 0, 0, 0.0
    unseen = range(args.first_step, HELD_OUT // args.batch)
    batches = iter(
        DataLoader(
            Batches(tokenizer, model.config, args.batch), batch_size=None, sampler=unseen, num_workers=args.workers
        )
    )
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * schedule(progress, step)
        batch = {name: tensor.to(args.device) for name, tensor in next(batches).items()}
        labels = batch.pop("labels")
        hidden = model.model(**batch, use_cache=False).last_hidden_state
        is_answer = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][is_answer])
        loss = functional.cross_entropy(logits, labels[:, 1:][is_answer])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        total += loss.item()
        if step - shown == 100:
            print(f"step {step} loss {total / 100:.4f} after {time.monotonic() - started:.0f} s", flush=True)
            shown, total = step, 0.0
    model.eval()
    return step


def schedule(progress: float, step: int, warmup: int = 100, floor: float = 0.01) -> float:
    """The learning rate's factor: up in a straight line, then a cosine down to `floor`."""
    return min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def save(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the folder in Hugging Face's own format, weights in bf16."""
    model.to("cpu", torch.bfloat16)
    ends = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # some releases write it for the owner alone
    tokenizer.save_pretrained(out)
    write_json(out / "preprocessor_config.json", {**PROCESSOR, "image_processor_type": "Qwen2VLImageProcessor"})
    write_json(out / "video_preprocessor_config.json", {**PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"})


def write_json(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def count_right(folder: Path, count: int) -> tuple[int, list[str]]:
    """Held-out pictures that are answered right, word for word, and what was said of the others."""
    if not count:
        return 0, []
    from transformers import Qwen2VLImageProcessorPil  # needs Pillow

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    right, wrong = 0, []
    for picture, question, answer in held_out(count):
        seen = processor(images=[picture.pixels], return_tensors="pt")
        placeholder = f"{VISION_START}{IMAGE * (int(seen['image_grid_thw'].prod()) // MERGE**2)}{VISION_END}"
        ids = torch.tensor([tokenizer.encode(chat_of([(question, "")], placeholder)[0], add_special_tokens=False)])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == image_id).int(),
            **seen,
            do_sample=False,
            max_new_tokens=16,
        )
        said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        right += said == answer
        if said != answer:
            wrong.append(f"{question} {said} (right: {answer})")
    return right, wrong


def measure(folder: Path, args: argparse.Namespace, run: str, machine: str) -> str:
    """The folder's README: what the model is, what it was trained on, and what it was measured to answer."""
    right, wrong = count_right(folder, args.pictures)
    num_parameters = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    lines = [
        "# The embedded vision model",
        "",
        f"A Qwen3-VL of {num_parameters:,} parameters in bf16 with its own tokenizer and",
        "image processor. It answers questions about shapes, colours, counts and digits in pictures like those that",
        "`examples/tiny_models/vision_pictures.py` draws, and is here so that pictures can be tried and tested",
        "offline. Of other pictures it knows nothing.",
        "",
        "Made by `examples/tiny_models/train_vision.py`, which also wrote this page.",
        "",
        "| | |",
        "|---|---|",
        f"| held-out pictures answered right, word for word | {right} of {args.pictures} |",
        f"| run | {run} of {args.batch} pictures, {QUESTIONS} questions each, every picture once; AdamW at"
        f" {args.learning_rate}, seed {SEED} |",
        f"| machine | {machine} |",
        f"| versions | Python {platform.python_version()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__} |",
        "",
    ]
    if wrong:
        lines += ["## Answered wrong", "", *(f"- {line}" for line in wrong), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
