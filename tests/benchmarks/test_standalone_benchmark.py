from pathlib import Path

from benchmarks.standalone import only


def test_a_folder_of_some_packages_has_what_they_require_and_nothing_else(tmp_path: Path) -> None:
    only(("scikit-learn",), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"sklearn", "numpy", "scipy", "joblib"} <= names
    assert not {"torch", "hydra", "ray", "autotune"} & names
    assert (tmp_path / "sklearn" / "__init__.py").is_file()
