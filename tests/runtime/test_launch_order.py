"""Programs as Inductor generates them, cut down to what counts."""

from __future__ import annotations

import pytest

from regraft.runtime.launch_order import keeps_order, read_kernel

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def kernel(name: str, *lines: str, parameters: str = "in_ptr0, out_ptr0, xnumel") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f"{name} = async_compile.triton('{name}', '''\n@triton.jit\n"
        f"def {name}({parameters}, XBLOCK : tl.constexpr):\n{body}''', device_str='cuda')\n"
    )


READS_EARLY = kernel(
    "reads_early", "tmp0 = tl.load(in_ptr0 + x0)", WAIT, LAUNCH, "tl.store(out_ptr0 + x0, tmp0)"
)
WAITS = kernel(
    "waits", WAIT, "tmp0 = tl.load(in_ptr0 + x0)", LAUNCH, "tl.store(out_ptr0 + x0, tmp0)"
)
SCATTERS = kernel("scatters", WAIT, "tmp0 = tl.load(in_ptr0)", LAUNCH, "tl.store(in_ptr1 + tmp0, 1.0)",
                  parameters="in_ptr0, in_ptr1, xnumel")  # fmt: skip
FILLS = kernel("fills", "tl.store(out_ptr0 + x0, 0.0)", parameters="out_ptr0, xnumel")
STORES_EARLY = kernel("stores_early", "tl.store(out_ptr0 + x0, 0.0)", WAIT, LAUNCH)
LAUNCHES_EARLY = kernel("launches_early", LAUNCH, WAIT, "tl.store(out_ptr0 + x0, 0.0)")
IN_A_BRANCH = kernel(
    "in_a_branch", "if pid < 4:", f"    {WAIT}", "    tl.store(out_ptr0 + x0, 0.0)"
)
KERNELS = READS_EARLY + WAITS + SCATTERS


def program(*calls: str, kernels: str = KERNELS) -> str:
    body = "".join(f"            {call}\n" for call in calls)
    return (
        f"{kernels}\nclass Runner:\n    def call(self, args):\n        arg0_1, arg1_1 = args\n"
        f"        args.clear()\n        with torch.cuda._DeviceGuard(0):\n"
        f"            torch.cuda.set_device(0)\n{body}        return (buf1, )\n"
    )


NEW = "buf{} = empty_strided_cuda((s0, 4), (4, 1), torch.float32)"
SOUND = {
    "waits behind another operator": ["buf0 = torch.ops.aten.mm.default(arg0_1, arg1_1)", "waits.run(buf0, buf1, 4)"],
    "reads what lies further back": [
        "extern_kernels.mm(arg0_1, arg1_1, out=buf0)", "waits.run(buf0, buf1, 4)", "reads_early.run(buf0, buf2, 4)",
    ],
    "a buffer is made between": ["waits.run(arg0_1, buf1, 4)", NEW.format(2), "reads_early.run(arg1_1, buf2, 4)"],
    "an input is copied between, and another one read": [
        "waits.run(buf0, buf1, 4)", "arg1_1 = copy_if_misaligned(arg1_1)", "reads_early.run(buf0, buf2, 4)",
    ],
    "another buffer is written in place": [
        "waits.run(arg0_1, buf1, 4)", "scatters.run(buf1, buf2, 4)", "reads_early.run(buf1, buf3, 4)",
    ],
}  # fmt: skip
UNSOUND = {
    "reads what was just written": ["waits.run(arg0_1, buf1, 4)", "reads_early.run(buf1, buf2, 4)"],
    "what was just written in place": [
        "waits.run(arg0_1, buf1, 4)", "scatters.run(buf1, buf2, 4)", "reads_early.run(buf2, buf3, 4)",
    ],
    "under another name": [
        "waits.run(arg0_1, buf1, 4)", "buf5 = buf1; del buf1  # reuse", "reads_early.run(buf5, buf2, 4)",
    ],
    "through a view": [
        "waits.run(arg0_1, buf1, 4)", "reads_early.run(reinterpret_tensor(buf1, (4, ), (1, ), 0), buf2, 4)",
    ],
    "through a view that was written": [
        "buf3 = reinterpret_tensor(buf1, (4, ), (1, ), 0)", "waits.run(arg0_1, buf3, 4)",
        "reads_early.run(buf1, buf2, 4)",
    ],
    "an input that was written": ["waits.run(buf0, arg0_1, 4)", "reads_early.run(arg1_1, buf2, 4)"],
    "an input that was just copied": [
        "waits.run(buf0, buf1, 4)", "arg1_1 = copy_if_misaligned(arg1_1)", "reads_early.run(arg1_1, buf2, 4)",
    ],
    "first of all": ["reads_early.run(arg0_1, buf1, 4)"],
    "behind another operator": [
        "buf0 = torch.ops.regraft.linear.default(arg0_1, arg1_1, None)", "reads_early.run(arg0_1, buf1, 4)",
    ],
    "what is not seen": ["waits.run(arg0_1, buf1, 4)", "reads_early.run(f(buf0), buf2, 4)"],
    "in a loop": ["for i in range(2):", "    waits.run(arg0_1, buf1, 4)"],
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_order_is_kept(name: str) -> None:
    assert keeps_order(program(*SOUND[name]))


@pytest.mark.parametrize("name", UNSOUND)
def test_a_kernel_that_touches_memory_too_early_is_found(name: str) -> None:
    assert not keeps_order(program(*UNSOUND[name]))


@pytest.mark.parametrize(
    "text",
    [FILLS, STORES_EARLY, LAUNCHES_EARLY, IN_A_BRANCH],
    ids=["never waits", "stores", "launches", "waits in a branch"],
)
def test_a_kernel_must_wait_before_it_writes_or_lets_the_next_one_start(text: str) -> None:
    assert keeps_order(program())
    assert not keeps_order(program(kernels=KERNELS + text))


def test_what_a_kernel_touches_early_and_writes() -> None:
    found = read_kernel(READS_EARLY.partition("'''")[2].partition("'''")[0])
    assert found is not None
    assert found.parameters == ("in_ptr0", "out_ptr0", "xnumel", "XBLOCK")
    assert found.early == {"in_ptr0"} and found.written == {"out_ptr0"}


def test_what_is_no_program_is_not_understood() -> None:
    assert not keeps_order("def call(:")
    assert keeps_order("")
