"""What serving a model cannot do without, against counts by hand."""

from __future__ import annotations

from regraft.runtime.bench.floor import Ceilings, Work
from tests.families.models import build


def test_a_token_meets_the_experts_that_it_is_sent_to_and_a_step_reads_all():
    model = build("mixtral")
    config = model.config
    expert = 3 * config.hidden_size * config.intermediate_size
    experts = config.num_hidden_layers * config.num_local_experts * expert
    chosen = config.num_hidden_layers * config.num_experts_per_tok * expert
    total = sum(p.numel() for p in model.parameters())
    table = model.get_input_embeddings().weight.numel()
    work = Work.of(model, 10, 3)
    assert work.weights == total - table - experts + chosen
    assert work.weight_bytes == 4 * (total - table)
    assert 0 < chosen < experts
    # 2 + 3 rows of 10 bytes, and two states that are read and written.
    bytes_read = work.weight_bytes + 10 * 5 + 2 * 3 * 2
    assert work.decode_seconds([2, 3], Ceilings(2.0, 1.0)) == bytes_read / 2
