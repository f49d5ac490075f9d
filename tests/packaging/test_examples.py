"""The examples run, from a folder with a tiny chat model, as the README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families.models import build

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("examples")]

ROOT = Path(__file__).parents[2]
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved llama with 256 token ids, one for each byte."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)
    wrapped.save_pretrained(path)
    build("llama").save_pretrained(path)
    return path


def run(script: str, *arguments: str | Path, **variables: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    environment = os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(folder: Path) -> None:
    printed = run("quickstart.py", folder, "--max-new-tokens", "8")
    assert "paged_attention" in printed
    assert "> What is the capital of France?" in printed
    for name in ("Regraft", "one by one", "padded", "generate_batch"):
        assert re.search(rf"{name}.* 64 .* 8 of 8$", printed, re.MULTILINE), printed


def test_benchmark(folder: Path) -> None:
    printed = run("benchmark_cpu.py", folder, "--chats", "4")
    assert printed.count("4 of 4") == 4
    assert "Regraft is" in printed
    made, all_logits = re.findall(r"([\d.]+) MiB", printed)
    assert float(made) < float(all_logits) / 4


def test_benchmark_beside_peers(tmp_path: Path) -> None:
    options = [
        "--requests",
        "3",
        "--prompt",
        "8",
        "20",
        "--new",
        "4",
        "--tokens",
        "256",
        "--repeats",
        "1",
    ]
    printed = run(
        "benchmark.py", "--shape", "tiny", "--device", "cpu", *options, "--peers", "generate", "vllm",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert re.search(r"^Regraft is [\d.]+ times generate$", printed, re.MULTILINE), printed
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["Regraft", "generate", "vllm"]
    assert all(row["tokens_per_second"] > 0 or row["problem"] for row in rows)


def test_bench_command(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "regraft",
        "bench",
        folder,
        "--requests",
        "3",
        "--prompt",
        "8",
        "20",
    ]
    more = [
        "--new",
        "4",
        "--tokens",
        "256",
        "--repeats",
        "1",
        "--peers",
        "batch",
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run([*map(str, command), *map(str, more)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Regraft is [\d.]+ times batch$", done.stdout, re.MULTILINE), done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["load"]["requests"] == 3


def test_device_check_on_the_cpu(tmp_path: Path) -> None:
    options = ["--requests", "3", "--new", "4", "--batches", "2,1", "--workers", "1"]
    printed = run(
        "device_check.py", "--device", "cpu", "--shape", "tiny", "--families", "llama", *options,
        "--parts", "families,decode,load", "--out", tmp_path / "out.json",
    )  # fmt: skip
    assert "1 of 1 families right in float32" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert max(found["families"]["llama"]["float32"].values()) <= 1e-4
    assert set(found["decode"]) == {"2", "1"}


def test_kernels_interpreted(tmp_path: Path) -> None:
    options = [
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "decode",
        "64",
        "--out",
        tmp_path / "out.json",
    ]
    printed = run(
        "kernel_floors.py", *options, TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path)
    )
    rows = {row["name"]: row["error"] for row in json.loads((tmp_path / "out.json").read_text())}
    assert len(rows) >= 9, printed
    assert max(rows.values()) <= 2e-2


def test_prefix_chats(folder: Path) -> None:
    sizes = ["--chats", "4", "--uncached", "2", "--shared", "200"]
    printed = run("prefix_chats.py", folder, *sizes)
    saved = [float(share) for share in re.findall(r"tokens fall by ([\d.]+)%", printed)]
    assert len(saved) == 2
    assert (
        min(saved) > 30
    )  # of four chats; where texts part the hybrid knows from the second one on
    assert printed.count("2 of 2 first tokens are the same") == 2


def test_serve_load(folder: Path) -> None:
    printed = run("serve_load.py", folder, "--streams", "6", "--new", "5", "--logprobs")
    assert "6 of 6 streams say what the engine says by itself" in printed
    assert len(re.findall(r"^outside the model [\d.]+% of", printed, re.MULTILINE)) == 2


def test_quantised() -> None:
    printed = run("quantised.py")
    assert re.search(r"^not quantised .* 2 grafted, 0 replayed", printed, re.MULTILINE)
    rows = printed.splitlines()[1:]
    ends = ("not installed", "refused: ", "does not run here: ", "grafted, ")
    assert len(rows) == 28 and all(any(end in row for end in ends) for row in rows)


def test_quantised_by_processes() -> None:
    kinds = "fine-grained fp8 saved dequantize,not quantised"
    printed = run("quantised.py", "--kinds", kinds, "--workers", "2")
    head, *rows = printed.splitlines()
    assert head.startswith("kind ")
    assert {row.split()[0] for row in rows} == {"fine-grained", "not"}
    assert "2 grafted, 0 replayed" in next(row for row in rows if row.startswith("not quantised"))


def test_own_pass() -> None:
    printed = run("own_pass.py")
    assert "mixing | replayed" in printed
    assert "running sum | grafted" in printed
    assert printed.count("validation  passed") == 2


def test_history() -> None:
    printed = run("history.py", "--histories", "8", "40")
    assert len(re.findall(r"behind 40: [\d.]+ times$", printed, re.MULTILINE)) == 4, printed


def test_latent() -> None:
    printed = run("latent.py", "--context", "200", "--repeats", "1")
    assert "latent rows            1,152 bytes a token,          230,400 read" in printed
    assert re.search(r"81,920 bytes a token, .* read: 71\.1 times$", printed, re.MULTILINE)
    (ratio,) = re.findall(r"rebuilt .* ms: (\d+) times$", printed, re.MULTILINE)
    assert int(ratio) > 4
