"""Public names exist and are documented, private names of torch stay in compat/, no file names a local path."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import elixir_compile

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("elixir_compile", "tests", "docs", "examples", "benchmarks", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".txt", ".json"} or path.parent.name == ".ci"
)
# A path that only one machine has. Put together here, so that this file does not find itself.
LOCAL_PATH = re.compile(r"/(?:" + "|".join(("home", "root", "work", "Users")) + r")/\w")


def test_public_names_have_docstrings() -> None:
    docs = {name: getattr(elixir_compile, name).__doc__ or "" for name in elixir_compile.__all__}
    assert [name for name, doc in docs.items() if len(doc.partition("\n")[0]) <= 10] == []


def test_public_functions_are_in_the_docs() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    words = set(re.findall(r"\w+", " ".join(page.read_text(encoding="utf-8") for page in pages)))
    assert {name for name in elixir_compile.__all__ if not name[0].isupper()} <= words


# Names with one leading underscore that the package uses outside of `compat`, each with the reason that it may.
ALLOWED = {
    # The dictionaries of `nn.Module`. torch's own FSDP, `parametrize` and `functional_call` edit them, saved modules
    # contain them under these names, and the public accessors make copies or walk the children too.
    "_parameters": "no public accessor replaces a parameter without a call of `register_parameter`",
    "_buffers": "no public accessor replaces a buffer without a call of `register_buffer`",
    "_modules": "`named_children` leaves out a module that is registered twice",
    # Documented in "In-place correctness checks" of torch's autograd notes, and typed in its stubs.
    "_version": "the version counter of a tensor",
    # Operators of ATen, named by its schemas; `torch.optim` and exported programs call them under these names.
    "_foreach_mul_": "many tensors times a scalar in one kernel",
    "_unsafe_view": "an op of captured graphs",
    "_unsafe_index_put": "an op of captured graphs",
    "_unsafe_masked_index_put_accumulate": "an op of captured graphs",
    "_scaled_dot_product_flash_attention": "an op of captured graphs",
    "_scaled_dot_product_flash_attention_backward": "an op of captured graphs",
    "_scaled_dot_product_flash_attention_for_cpu": "an op of captured graphs",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "an op of captured graphs",
    "_scaled_dot_product_efficient_attention_backward": "an op of captured graphs",
    "_efficient_attention_backward": "an op of captured graphs",
    # Not of torch.
    "_init_weights": "the method of transformers' models that their authors write",
    "_replace": "the documented method of named tuples",
    "_exit": "documented as `os._exit`",
    "_reconstructor": "pickles of every Python contain `copyreg._reconstructor`",
}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None


def own_names(tree: ast.AST) -> set[str]:
    """Return the private names that the code of `tree` itself defines: functions, fields, attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def foreign_private_names(tree: ast.AST, inherited: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name in `tree` that `tree` does not define.

    A private name is imported from torch, or is an attribute with one leading underscore. `self` may also have the
    names in `inherited`, which classes of other files define.
    """
    own = own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=imported) if re.match(r"torch\b", module):
                names = [module, *(alias.name for alias in imported)]
                yield from ((node.lineno, part) for name in names for part in name.split(".") if is_private(part))
            case ast.Import(names=imported):
                names = [alias.name for alias in imported if re.match(r"torch\b", alias.name)]
                yield from ((node.lineno, part) for name in names for part in name.split(".") if is_private(part))
            case ast.Attribute(value=value, attr=name) if is_private(name) and name not in own:
                if not (isinstance(value, ast.Name) and value.id in {"self", "cls"} and name in inherited):
                    yield node.lineno, name
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                if function in BY_NAME and is_private(name) and name not in own:
                    yield node.lineno, name


def test_private_names_of_torch_are_in_compat_or_allowed_with_a_reason() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES if path.parent.name != "compat"}
    inherited = set().union(*map(own_names, trees.values()))
    found = [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for path, tree in trees.items()
        for line, name in foreign_private_names(tree, inherited)
    ]
    assert [(place, name) for place, name in found if name not in ALLOWED] == []
    assert set(ALLOWED) == {name for _, name in found}, "the list allows a name that the package does not use"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._inductor import x",
        "from torch.fx._utils import y",
        "from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo",
        "from torch.utils import _pytree as tree",
        "torch._C.z()",
        "x = param._backward_hooks",
        "optimizer._step_count = 1",
        "for op in (torch.ops.aten.add,): op.default._schema",
        "getattr(op, '_schema', None)",
        "class A(nn.Module):\n    def f(self): return self._forward_hooks",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert [name for _, name in foreign_private_names(ast.parse(code)) if name not in ALLOWED]


@pytest.mark.parametrize(
    "code",
    [
        "import torch",
        "from torch.nn import Module",
        "x.__dict__",
        "class A:\n    _x: int\n    def f(self): return other._x",
        "class A:\n    def __init__(self): self._x = 1",
    ],
)
def test_an_own_or_public_name_is_not_found(code: str) -> None:
    assert list(foreign_private_names(ast.parse(code))) == []


def test_compat_imports_private_names_only_inside_functions() -> None:
    """So a name that torch renames breaks the function that uses it, and not the import of the package."""
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        if path.parent.name == "compat"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line, name in foreign_private_names(node)
    ]
    assert found == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if LOCAL_PATH.search(line)
    ]
    assert found == []
    assert LOCAL_PATH.search("/" + "home/someone")
