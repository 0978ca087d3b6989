"""Edited scripts make other transforms and do nothing else differently."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.measure.equivalents import DROP_INS
from offload.probe.edits import edit, unified_diff


def edited(text: str) -> str:
    return edit(text, DROP_INS).text


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from torchvision import transforms", "transforms.GaussianBlur"),
        ("from torchvision import transforms as T", "T.GaussianBlur"),
        ("from torchvision.transforms import GaussianBlur", "GaussianBlur"),
        ("from torchvision.transforms import GaussianBlur as Blur", "Blur"),
        ("from torchvision.transforms import v2", "v2.GaussianBlur"),
        ("import torchvision.transforms.v2 as T", "T.GaussianBlur"),
        ("import torchvision", "torchvision.transforms.v2.GaussianBlur"),
        ("from torchvision.transforms.v2 import GaussianBlur", "GaussianBlur"),
        (
            "try:\n    from torchvision.transforms import v2 as T\nexcept ImportError:\n    from torchvision import transforms as T",
            "T.GaussianBlur",
        ),
    ],
)
def test_each_way_to_import_the_class_is_understood(imports: str, call: str) -> None:
    text = f'"""Trains."""\nimport offload\n{imports}\nx = [{call}(11, sigma=(0.1, 2))] * 2  # ten\n'
    found = edit(text, DROP_INS)
    assert found.text == text.replace(f"[{call}(", "[offload.transforms.GaussianBlur(")
    assert [use.text for use in found.replaced] == [call]
    assert found.by_hand == ()
    assert edit(found.text, DROP_INS).replaced == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import offload as o\n{v2}\nv2.ColorJitter(hue=0.1)\n", "import offload as o\n{v2}\no.transforms.ColorJitter(hue=0.1)\n"),
        ("{v2}\nv2.GaussianBlur(3)\n", "{v2}\nimport offload\noffload.transforms.GaussianBlur(3)\n"),
        ("{v2}\r\nv2.GaussianBlur(3)\r\n", "{v2}\r\nimport offload\r\noffload.transforms.GaussianBlur(3)\r\n"),
        ("{v2}; a = (\n1)\nv2.GaussianBlur(3)", "import offload\n{v2}; a = (\n1)\noffload.transforms.GaussianBlur(3)"),
        (
            "{v2}\noffload = 3\nv2.GaussianBlur(3)\n",
            "{v2}\nfrom offload import transforms as offload_transforms\noffload = 3\noffload_transforms.GaussianBlur(3)\n",
        ),
        (
            "import typing\nif typing.TYPE_CHECKING:\n    import offload\n{v2}\nv2.GaussianBlur(3)\n",
            "import typing\nimport offload\nif typing.TYPE_CHECKING:\n    import offload\n{v2}\noffload.transforms.GaussianBlur(3)\n",
        ),
        (
            "#!/usr/bin/env python\n# é\nfrom __future__ import annotations\n{v2}\nx = 'é', v2.GaussianBlur(3)\n",
            "#!/usr/bin/env python\n# é\nfrom __future__ import annotations\n{v2}\nimport offload\n"
            "x = 'é', offload.transforms.GaussianBlur(3)\n",
        ),
        (
            "@print\ndef f():\n    {v2}\n    return v2.GaussianBlur(3)\n",
            "import offload\n@print\ndef f():\n    {v2}\n    return offload.transforms.GaussianBlur(3)\n",
        ),
    ],
)  # fmt: skip
def test_the_import_is_added_where_it_is_missing(before: str, after: str) -> None:
    v2 = "from torchvision.transforms import v2"
    assert edited(before.replace("{v2}", v2)) == after.replace("{v2}", v2)


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("T = v2\nT.GaussianBlur(3)\n", [(3, "T.GaussianBlur")]),
        ("import functools\nfunctools.partial(v2.GaussianBlur, 3)\n", [(3, "v2.GaussianBlur")]),
        ("class Mine(v2.GaussianBlur): ...\n", [(2, "v2.GaussianBlur")]),
        ('getattr(v2, "GaussianBlur")(3)\n', [(2, 'getattr(…, "GaussianBlur")')]),
        ("def f(v2):\n    return v2.GaussianBlur(3)\n", [(3, "v2.GaussianBlur")]),
        ("from torchvision.transforms import *\nGaussianBlur(3)\n", [(3, "GaussianBlur")]),
        ("x = v2 . GaussianBlur(3)\n", [(2, "v2.GaussianBlur")]),
    ],
)
def test_other_uses_are_left_to_the_user(text: str, uses: list[tuple[int, str]]) -> None:
    text = "from torchvision.transforms import v2\n" + text
    found = edit(text, DROP_INS)
    assert found.text == text
    assert [(use.line, use.text) for use in found.by_hand] == uses


@pytest.mark.parametrize(
    "text",
    [
        "from kornia.augmentation import GaussianBlur\nGaussianBlur(3)\n",
        "class GaussianBlur: ...\nGaussianBlur()\n",
        "from .mine import GaussianBlur\nGaussianBlur(3)\n",
        "import offload\noffload.transforms.GaussianBlur(3)\n",
        "from torchvision.transforms import v2\nv2.Resize(3)\n# v2.GaussianBlur(3)\nx = 'v2.GaussianBlur(3)'\n",
    ],
)
def test_other_classes_of_the_name_are_left_alone(text: str) -> None:
    found = edit(text, DROP_INS)
    assert (found.text, found.replaced, found.by_hand) == (text, (), ())


def test_a_name_means_what_its_scope_says() -> None:
    text = (
        "from torchvision import transforms\nimport offload\n"
        "class Data:\n"
        "    def __init__(self, transforms=transforms.GaussianBlur(3)):\n"  # the module's
        "        self.transforms = transforms\n"
        "class Wide:\n    transforms = None\n"
        "    def wide(self):\n        return transforms.GaussianBlur(5)\n"  # the module's: a method does not see its class
        "def mine(transforms):\n    return transforms.GaussianBlur(3)\n"  # the caller's
    )
    found = edit(text, DROP_INS)
    assert [use.line for use in found.replaced] == [4, 9]
    assert [use.line for use in found.by_hand] == [11]


STATEMENTS = st.sampled_from(
    [
        "x = v2.GaussianBlur(11)",
        "y = [v2.GaussianBlur(k) for k in (3, 5)]",
        "z = v2.Compose([v2.Resize(9), v2.ColorJitter(0.1, hue=v2.GaussianBlur(3).sigma), 'é'])",
        "def f(a=v2.GaussianBlur(3)):\n    return [\n        v2.GaussianBlur(\n            5,  # wide\n        )\n    ]",
        "class C:\n    blur = v2.GaussianBlur(3)\n\n    def g(self):\n        return v2.GaussianBlur(3)",
        "import os; import sys",
        "import offload",
        "'text'",
        "\n# a comment\n",
    ]
)  # fmt: skip


@given(statements=st.lists(STATEMENTS, max_size=6), newline=st.sampled_from(["\n", "\r\n"]), end=st.booleans())
def test_an_edit_changes_names_of_calls_and_one_import_and_can_be_applied(
    statements: list[str], newline: str, end: bool
) -> None:
    text = newline.join(["from torchvision.transforms import v2", *statements]).replace("\r\n", "\n")
    text = text.replace("\n", newline) + (newline if end else "")
    after = edited(text)

    class Theirs(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            name = (
                "v2"
                if ast.unparse(node) in ("offload.transforms.GaussianBlur", "offload.transforms.ColorJitter")
                else None
            )
            return (
                ast.Attribute(ast.Name(name, node.value.ctx), node.attr, node.ctx) if name else self.generic_visit(node)
            )  # type: ignore[attr-defined]

    back = ast.unparse(Theirs().visit(ast.parse(after))).splitlines()
    before = ast.unparse(ast.parse(text)).splitlines()
    added = "import offload" if len(back) > len(before) else None
    if added:
        back.remove(added)
    assert back == before
    assert edit(after, DROP_INS).replaced == ()
    # Lines that hold no call are the same bytes.
    assert [line for line in text.split("\n") if "Blur" not in line and "Jitter" not in line] == [
        line for line in (after.replace(f"import offload{newline}", "", 1) if added else after).split("\n")
        if "Blur" not in line and "Jitter" not in line
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_diff_is_one_that_git_applies(tmp_path: Path, end: str) -> None:
    text = f"from torchvision.transforms import v2\r\n\x0c\r\na = 1\r\n\r\nx = v2.GaussianBlur(3){end}"
    (tmp_path / "train.py").write_bytes(text.encode())
    diff = unified_diff(text, edited(text), "train.py")
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True, timeout=800)
    assert (tmp_path / "train.py").read_bytes().decode() == edited(text)
    assert unified_diff(text, text, "train.py") == ""
