"""The capture check: modules that break each rule are refused by name, good ones pass with the right count."""

import copy
import os
import signal
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

from openmm_tensornet import load_model
from openmm_tensornet.common.atoms import Atoms
from openmm_tensornet.common.interrupts import apart
from openmm_tensornet.export import programs
from openmm_tensornet.export.compiled import compile_potential
from openmm_tensornet.graph.capture import VIEWS, GraphSafetyError, check_graph_safety, declare_launches
from openmm_tensornet.static.potential import Options, StaticPotential

HOST_VALUE = "it copies a value to the host and waits for it"
SHAPE = "the shape of its result depends on values"
HOST_TENSOR = "a tensor lives on the host"


def positions() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(1))


def eager(module: nn.Module) -> nn.Module:
    return module


def scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(module, positions(), check_trace=False)


def frozen(module: nn.Module) -> nn.Module:
    return torch.jit.freeze(torch.jit.script(module.eval()))


EVERY_WAY = (eager, scripted, traced, frozen)
# A trace keeps the outcome of a decision and loses the decision, so that there is nothing left to refuse.
NOT_TRACED = (eager, scripted, frozen)


# ------------------------------------------------------------------------------------------- what is refused


class BooleanMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0.5].sum()


class RowMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0.5]


class MaskedWrite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[x > 0.5] = x.sum()
        return y


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x > 0.5)


class WhereOfOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0.5)[0]


class MaskedSelect(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.masked_select(x, x > 0.5)


class Unique(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.unique(x)


class UniqueConsecutive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.unique_consecutive(x)


class Bincount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bincount(x[:, 0].to(torch.long))


class Repeat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, x[:, 0].to(torch.long), dim=0)


class SliceByData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int((x > 0.5).sum())]


class ShapeByData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(int((x > 0.5).sum()), device=x.device)


class If(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 0.5).any():
            return x
        return -x


class Equal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.equal(x, x.abs()):
            return x
        return -x


class HostConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])


class HostNumber(nn.Module):
    """PyTorch itself allows a 0-d host tensor beside device ones, but copies it at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(2.0)


class CopiedConstant(nn.Module):
    """Made on the host, then copied to the device at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0], device=x.device)


class HostZeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(3)


class PlainAttribute(nn.Module):
    """A tensor that `.to()` does not move, since it is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class RoundTrip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu().to(x.device)


REFUSED = [
    (BooleanMask, "aten.index.Tensor", SHAPE, EVERY_WAY),
    (RowMask, "aten.index.Tensor", SHAPE, EVERY_WAY),
    (MaskedWrite, "aten.index_put_.default", SHAPE, EVERY_WAY),
    (Item, "aten._local_scalar_dense.default", HOST_VALUE, NOT_TRACED),
    (Float, "aten._local_scalar_dense.default", HOST_VALUE, NOT_TRACED),
    (Nonzero, "aten.nonzero.default", SHAPE, EVERY_WAY),
    (WhereOfOne, "aten.nonzero.default", SHAPE, EVERY_WAY),
    (MaskedSelect, "aten.masked_select.default", SHAPE, EVERY_WAY),
    (Unique, "aten._unique2.default", SHAPE, EVERY_WAY),
    (UniqueConsecutive, "aten.unique_consecutive.default", SHAPE, EVERY_WAY),
    (Bincount, "aten.bincount.default", SHAPE, EVERY_WAY),
    (Repeat, "aten.repeat_interleave.Tensor", SHAPE, EVERY_WAY),
    (SliceByData, "aten._local_scalar_dense.default", HOST_VALUE, NOT_TRACED),
    (ShapeByData, "aten._local_scalar_dense.default", HOST_VALUE, NOT_TRACED),
    (If, "aten._local_scalar_dense.default", HOST_VALUE, NOT_TRACED),
    (Equal, "aten.equal.default", HOST_VALUE, NOT_TRACED),
    (HostConstant, None, HOST_TENSOR, EVERY_WAY),
    (HostNumber, None, HOST_TENSOR, (eager,)),
    (HostNumber, "aten._local_scalar_dense.default", HOST_VALUE, (scripted, traced, frozen)),
    (CopiedConstant, None, HOST_TENSOR, EVERY_WAY),
    (HostZeros, None, HOST_TENSOR, EVERY_WAY),
    (PlainAttribute, "aten.mul.Tensor", HOST_TENSOR, EVERY_WAY),
    (RoundTrip, "aten._to_copy.default", HOST_TENSOR, NOT_TRACED),
]


@pytest.mark.parametrize(
    ("module", "operator", "reason", "way"),
    [
        pytest.param(module, operator, reason, way, id=f"{module.__name__}-{way.__name__}")
        for module, operator, reason, ways in REFUSED
        for way in ways
    ],
)
def test_refused(module, operator, reason, way):
    made = way(module())
    with pytest.raises(GraphSafetyError) as caught:
        check_graph_safety(made, positions())
    start = f"the module cannot be captured in a CUDA graph: {operator or 'aten.'}"
    assert str(caught.value).startswith(start)
    assert reason in str(caught.value)


def test_the_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"nonzero"):
        check_graph_safety(Nonzero(), positions())


def test_the_last_operator_is_named_when_a_module_fails():
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cos(x) @ x

    with pytest.raises(GraphSafetyError, match=r"after aten\.(cos\.default|mm\.default): .*(5|3)"):
        check_graph_safety(Wrong(), positions())


def test_a_refusal_that_the_module_swallows_still_counts():
    class Swallows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x * x.sum().item()
            except ValueError:
                return x

    with pytest.raises(GraphSafetyError, match=r"_local_scalar_dense"):
        check_graph_safety(Swallows(), positions())


# --------------------------------------------------------------------------------------------- what passes


class ViewsOnly(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x.t().unsqueeze(0).expand(2, 3, 5).unbind(1)[1]
        a = a.split(2, dim=1)[0].split([1, 1], dim=0)[0].squeeze(0).narrow(0, 0, 2)[1:]
        b = x.permute(1, 0).transpose(0, 1).view(3, 5).reshape(15).unflatten(0, (5, 3)).flatten()
        b = b.as_strided((3, 3), (3, 1)).diagonal().detach()
        c = x.unfold(0, 2, 1).select(2, 0)
        return a, b, c


class Arithmetic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = 2.0 * x  # 1
        y = y + x.sum(0, keepdim=True)  # 2, 3
        return torch.where(y > 0.5, y, 0.0)  # comparison 4, selection 5, and filling the number's scalar tensor 6


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.t().reshape(15)  # not contiguous: 1
        y = torch.cat((y, y))  # 2
        z = torch.zeros(30, device=x.device)  # 3
        y = z.index_add(0, torch.arange(30, device=x.device), y)  # 4, 5
        return y.to(torch.float64).contiguous().to(torch.float64)  # 6


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([1, 2, 0]))
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x[self.order])  # index 1, addmm 2
        return torch.relu(y.index_select(0, self.order[:1]))  # 3, 4


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)  # allocates only
        y.copy_(x).mul_(2.0)  # 1, 2
        y.masked_fill_(y > 1.0, 0.0)  # 3, 4
        return y.clone()  # 5


class KnownRepeat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.tensor([2, 0, 1, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        # The length is given, so nothing waits: places 1, gather 2.
        return torch.repeat_interleave(x, self.counts, dim=0, output_size=7)


class BranchOnShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 3 and x.dtype == torch.float32:
            x = torch.sin(x)  # 1
        for _ in range(x.size(1)):
            x = torch.cos(x)  # 2, 3, 4
        return x


PASSES = [
    (ViewsOnly, 0, (eager, scripted, traced)),
    # A trace makes 0-d host tensors of numbers, and the host of the device of what it creates.
    (Arithmetic, 6, (eager, scripted)),
    (Copies, 6, (eager, scripted)),
    (InPlace, 5, (eager, scripted)),
    (Buffered, 4, (eager, scripted, traced)),
    (KnownRepeat, 2, (eager, scripted, traced)),
    (BranchOnShape, 4, (eager, scripted, traced)),
]


@pytest.mark.parametrize(
    ("module", "launches", "way"),
    [
        pytest.param(module, launches, way, id=f"{module.__name__}-{way.__name__}")
        for module, launches, ways in PASSES
        for way in ways
    ],
)
def test_passes_with_the_right_count(module, launches, way):
    result = check_graph_safety(way(module()), positions())
    assert result.kernels == launches, result.operators
    assert sum(result.operators.values()) == launches


@pytest.mark.parametrize("operator", sorted(VIEWS, key=str), ids=str)
def test_what_is_listed_as_a_view_is_one(operator):
    """PyTorch's own schema says that the result shares memory with the first argument, which is not written to."""
    if operator is torch.ops.aten._unsafe_view.default:  # a view that autograd must not know of
        x = positions()
        assert operator(x, (15,)).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return
    shared = operator._schema.arguments[0].alias_info
    assert shared is not None and not shared.is_write
    for result in operator._schema.returns:
        assert result.alias_info is not None


def test_operators_are_recorded_by_name():
    result = check_graph_safety(BranchOnShape(), positions())
    assert dict(result.operators) == {"aten.sin.default": 1, "aten.cos.default": 3}


@pytest.mark.parametrize("way", [eager, scripted, traced], ids=lambda way: way.__name__)
def test_the_module_and_its_inputs_are_not_changed(way):
    module = way(Buffered())
    before = copy.deepcopy(dict(module.state_dict()))
    x = positions()
    expected = module(x)
    check_graph_safety(module, x)
    for name, value in module.state_dict().items():
        assert type(value.detach()) is Tensor and value.device.type == "cpu"
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(x, positions(), rtol=0, atol=0)


def test_two_inputs():
    class Scale(nn.Module):
        def forward(self, x: Tensor, box: Tensor) -> Tensor:
            return x @ box

    assert check_graph_safety(Scale(), positions(), torch.eye(3)).kernels == 1


# --------------------------------------------------------------------------------- derivatives by parameters


class Times(nn.Module):
    """An energy and forces, times a parameter."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum() * scale, -x * scale.detach()  # sum 1, products 2 and 4, minus 3


class Product(torch.autograd.Function):
    """Of an energy and a parameter, with a backward pass that keeps to no rule."""

    @staticmethod
    def forward(ctx, energy: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(energy)
        return energy * scale

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return None, BACKWARD["scale"](gradient, *ctx.saved_tensors)


BACKWARD = {"scale": lambda g, energy: g * energy}


class Custom(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return Product.apply(x.sum(), scale), -x * scale.detach()


@pytest.mark.parametrize("way", [eager, scripted, frozen], ids=lambda way: way.__name__)
def test_the_backward_pass_of_a_parameter_counts(way):
    scale = torch.ones(1)
    assert check_graph_safety(way(Times()), positions(), scale).kernels == 4
    result = check_graph_safety(way(Times()), positions(), scale.requires_grad_())
    assert result.kernels == result.counted == 6, result.operators
    assert result.operators["aten.ones_like.default"] == 1


@pytest.mark.parametrize(
    ("backward", "operator", "reason"),
    [
        (lambda g, e: g * e.item(), "aten._local_scalar_dense.default", HOST_VALUE),
        (lambda g, e: (g * e)[g > 0], "aten.index.Tensor", SHAPE),
        (lambda g, e: g * torch.ones(1), "aten.ones.default", HOST_TENSOR),
    ],
)
def test_the_backward_pass_of_a_parameter_is_checked(monkeypatch, backward, operator, reason):
    scale = torch.ones(1, requires_grad=True)
    assert check_graph_safety(Custom(), positions(), scale).kernels == 6
    monkeypatch.setitem(BACKWARD, "scale", backward)
    assert check_graph_safety(Custom(), positions(), scale.detach()).kernels == 4
    with pytest.raises(GraphSafetyError, match=rf"{operator}.*: .*{reason.split('(')[0]}"):
        check_graph_safety(Custom(), positions(), scale)


@pytest.mark.parametrize("periodic", [False, True], ids=["vacuum", "box"])
@pytest.mark.parametrize("kernels", ["portable", "fused"])
def test_the_scale_parameter_of_a_force(model_path, kernels, periodic):
    """Of shape (1,) on CUDA: a cast and two products, and backward a cast, a product and the gradient to begin with."""
    model = load_model(model_path("variants/zero-layers"))
    plain = compile_potential(model, Atoms.make([8, 1, 1]), Options(kernels=kernels, periodic=periodic))
    inputs = [torch.rand(3, 3), torch.eye(3) * 3][: 1 + periodic]
    scaled = plain.scaled().module
    launches = [check_graph_safety(scaled, *inputs, torch.ones(1, requires_grad=r)).kernels for r in (False, True)]
    assert launches == [plain.metadata["launches"] + 3, plain.metadata["launches"] + 6]


# ----------------------------------------------------------------------------------------- custom operators


@pytest.fixture(scope="module")
def library():
    """Three operators: one whose launches the tests declare, one undeclared, one without a rule for fake tensors."""
    made = torch.library.Library("openmm_tensornet_test", "DEF")
    for name in ("declared", "undeclared", "opaque"):
        made.define(f"{name}(Tensor x) -> Tensor")
        made.impl(name, lambda x: 2 * x, "CPU")
        made.impl(name, lambda x: 2 * x, "CUDA")
    for name in ("declared", "undeclared"):
        torch.library.register_fake(f"openmm_tensornet_test::{name}", torch.empty_like, lib=made)
    yield made
    made._destroy()


class Declared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.openmm_tensornet_test.declared(x)
        return torch.ops.openmm_tensornet_test.declared(x.t()).sum()


class Undeclared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.openmm_tensornet_test.undeclared(x)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.openmm_tensornet_test.opaque(x)


@pytest.mark.parametrize("way", [eager, scripted, traced], ids=lambda way: way.__name__)
@pytest.mark.parametrize("launches", [0, 3])
def test_a_custom_operator_counts_what_it_declares(library, way, launches):
    declare_launches("openmm_tensornet_test::declared", launches)
    result = check_graph_safety(way(Declared()), positions())
    assert result.kernels == 2 * launches + 1
    assert result.operators["openmm_tensornet_test.declared.default"] == 2


@pytest.mark.parametrize("way", [eager, scripted, traced], ids=lambda way: way.__name__)
def test_inside_of_a_custom_operator(library, way):
    """PyTorch's operators that it calls count, and keep to the same rules."""

    def two_and_one(x: Tensor) -> int:
        assert x.is_cuda
        x.cos().sin()
        return 1

    declare_launches("openmm_tensornet_test::declared", 2, two_and_one)
    result = check_graph_safety(way(Declared()), positions())
    assert result.kernels == result.counted == 2 * 3 + 1
    declare_launches("openmm_tensornet_test::declared", 5, two_and_one)
    result = check_graph_safety(way(Declared()), positions())
    assert (result.kernels, result.counted) == (2 * 5 + 1, 2 * 3 + 1)
    declare_launches("openmm_tensornet_test::declared", 5, lambda x: int(x.sum()))
    with pytest.raises(GraphSafetyError, match=r"declared\.default: inside of it, .*item.*copies a value to the host"):
        check_graph_safety(way(Declared()), positions())
    declare_launches("openmm_tensornet_test::declared", 5, lambda x: int((x * torch.zeros(3)).dim()))
    with pytest.raises(GraphSafetyError, match=r"inside of it, .*a tensor lives on the host"):
        check_graph_safety(way(Declared()), positions())


@pytest.mark.parametrize("way", [eager, scripted], ids=lambda way: way.__name__)
def test_a_signal_is_no_fault_of_the_module(library, way):
    """What its handler raises reaches the user."""

    class Stop(Exception):
        pass

    def handler(*_):
        raise Stop

    sent = []

    def signalled(x: Tensor) -> int:
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return 1

    declare_launches("openmm_tensornet_test::declared", 1, signalled)
    former = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(Stop):
            check_graph_safety(way(Declared()), positions())
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("way", [eager, scripted, traced], ids=lambda way: way.__name__)
def test_a_custom_operator_must_declare_its_launches(library, way):
    with pytest.raises(
        GraphSafetyError, match=r"openmm_tensornet_test\.undeclared\.default: it does not declare its launches; see .*"
    ):
        check_graph_safety(way(Undeclared()), positions())


@pytest.mark.parametrize("way", [eager, scripted], ids=lambda way: way.__name__)
def test_a_custom_operator_without_a_rule_for_fake_tensors_is_named(library, way):
    declare_launches("openmm_tensornet_test::opaque", 1)
    with pytest.raises(GraphSafetyError, match=r"openmm_tensornet_test\.opaque\.default"):
        check_graph_safety(way(Opaque()), positions())


# --------------------------------------------------------------------------------------------- the real thing


def test_static_potential(model_path):
    """The check counts what the flat graph contains; the reference model, made for reading, is refused."""
    model = load_model(model_path("variants/zero-layers"))
    potential = StaticPotential.make(model, Atoms.make([8, 1, 1]), Options(tabulate=False))
    x = torch.tensor([[0.0, 0, 0], [0.1, 0, 0], [0, 0.1, 0]])
    result = check_graph_safety(potential, x)
    called = [node.target for node in potential.program.graph.nodes if node.op == "call_function"]
    assert result.kernels == sum(isinstance(f, torch._ops.OpOverload) and f not in VIEWS for f in called) > 20

    class Reference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            from openmm_tensornet.neighbors.reference import find_pairs

            z = torch.tensor([8, 1, 1], device=x.device)
            replicas = torch.zeros(3, dtype=torch.long, device=x.device)
            return self.model(z, x, replicas, find_pairs(x, replicas, 4.5), 1)

    with pytest.raises(GraphSafetyError):
        check_graph_safety(Reference(), x)


def test_an_exported_module_runs_after_its_check(model_path):
    """The check pretends a GPU; the plan that TorchScript makes for that must not stay with the module."""
    exported = compile_potential(load_model(model_path("variants/zero-layers")), Atoms.make([8, 1]))
    for _ in range(3):
        energy, forces = exported.module(torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.0, 0.0]]))
        assert torch.isfinite(energy) and torch.isfinite(forces).all()


def test_programs_are_checked_as_they_are_run(monkeypatch):
    """In TorchScript a constant that the flat graph makes on the GPU would be made on the host."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(torch.ops.aten.ones.default, ([3],), {"device": torch.device("cuda")})
    forces = graph.call_function(torch.ops.aten.mul.Tensor, (x, ones))
    graph.output((graph.call_function(torch.ops.aten.sum.default, (x,)), forces))
    program = fx.GraphModule(nn.Module(), graph)
    assert check_graph_safety(program, positions()).kernels == 3
    monkeypatch.setattr(programs, "_make", lambda data, key: (None, SimpleNamespace(gpu_program=program)))
    data = torch.zeros(1, dtype=torch.uint8)
    assert check_graph_safety(programs.Potential(data, "key", 1, scripted=False), positions()).kernels == 3
    with pytest.raises(GraphSafetyError, match=rf"aten\.(ones\.default|mul\.Tensor): {HOST_TENSOR}"):
        check_graph_safety(programs.Potential(data, "key", 1, scripted=True), positions())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, which lists threads, is Linux's")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_thread(fails):
    """Nor after an error: a script often ends with it."""
    numbers = []

    def work():
        numbers.append(threading.get_native_id())
        if fails:
            raise ValueError("no")
        return 3

    for _ in range(20):
        if fails:
            with pytest.raises(ValueError, match="no"):
                apart(work)
        else:
            assert apart(work) == 3
        assert not os.path.exists(f"/proc/self/task/{numbers[-1]}")
    assert threading.get_native_id() not in numbers
