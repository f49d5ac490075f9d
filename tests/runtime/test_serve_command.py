"""`regraft serve` as a process: a real model, a signal, and what is said when it cannot start."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regraft.__main__ import main
from tests.runtime.servers import chat_tokenizer


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["serve", "m"]) == 2
    message = "serve needs fastapi, uvicorn, prometheus_client: pip install 'regraft[serve]'"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "is open to other machines: give an api_key"),
        (["--max-requests", "0"], "max_requests=0 is not a whole number of 1 or more"),
        (["--max-waiting", "0"], "max_waiting=0 is not above 0"),
    ],
)
def test_wrong_settings_are_told_before_the_model_is_loaded(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.delenv("REGRAFT_API_KEY", raising=False)
    assert main(["serve", "no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_drains(tmp_path):
    """The answer that is under way when the signal comes is finished, and the process ends well."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "regraft", "serve", str(tmp_path), "--model-name", "tiny"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--api-key", "k", "--prefix-cache"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        url = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, process.stderr.read()
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 300,
            "temperature": 0,
        }
        answers = []

        def ask():
            headers = {"Authorization": "Bearer k"}
            path = f"{url}/v1/chat/completions"
            answers.append(httpx.post(path, json=body, headers=headers, timeout=60))

        ask()  # warm
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        thread.join()
        process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM)  # uvicorn dies of it in the end
    first, second = (answer.json() for answer in answers)
    assert first["usage"]["completion_tokens"] == 300
    assert second["choices"] == first["choices"]
