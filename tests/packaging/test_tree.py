"""The shape of the source tree: names at the top, environment variables, lengths of files."""

import ast
import re

TOP = {
    *("csrc", "lrd_kernels", "python", "tests", "benchmarks", "docs"),
    *("setup.py", "CMakeLists.txt", "pyproject.toml", "Makefile", "MANIFEST.in", "mkdocs.yml"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"),
}
NATIVE = {".cpp", ".h", ".cu", ".cuh"}
MOST_LINES = 500


def test_top_level_holds_known_names(project_files):
    names = {file.parts[0] for file in project_files}
    assert {name for name in names if not name.startswith(".")} <= TOP
    assert {"lrd_kernels", "setup.py", "README.md"} <= names


def test_environment_variables_are_those_of_the_readme(root, project_files):
    read = set()
    for file in project_files:
        if file.parts[0] in ("tests", "docs"):
            continue
        if file.suffix == ".py":
            strings = (node.value for node in ast.walk(ast.parse((root / file).read_text())) if is_string(node))
            read |= {text for text in strings if re.fullmatch(r"LRD_[A-Z0-9_]+", text)}
        elif file.suffix in NATIVE:
            read |= set(re.findall(r'getenv\("(LRD_\w+)"', (root / file).read_text()))
        elif file.name in ("CMakeLists.txt", "Makefile"):
            read |= set(re.findall(r"(?:\$ENV\{|\$\$\{?)(LRD_\w+)", (root / file).read_text()))
    assert "LRD_CPU_ISA" in read
    listed = set(re.findall(r"^\| *`(LRD_\w+)", (root / "README.md").read_text(), re.MULTILINE))
    assert listed == read


def test_no_source_file_is_long(root, project_files):
    sources = [file for file in project_files if file.suffix in {".py", *NATIVE}]
    lengths = {str(file): len((root / file).read_text().splitlines()) for file in sources}
    assert lengths
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}


def is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
