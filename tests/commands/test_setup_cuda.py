"""launch/setup.sh: which torch it installs, and whether Horovod with NCCL is built with a CUDA toolkit or NVIDIA's wheels.

The CUDA versions of torch in these tests, such as 13.77, do not exist, so no toolkit on this machine matches them.
"""

from __future__ import annotations

import re

import pytest

NCCL = {"DUALTRAIN_GPU": "nccl", "DUALTRAIN_WITH": "none"}


def refusal(setup, **env):
    """Run a set-up that is refused before Horovod's build; return its only line of errors."""
    status, _, errors = setup.run(**NCCL | env)
    (line,) = errors.splitlines()
    assert status == 2
    assert not [call for call in setup.calls() if call.startswith("wheel ")]
    return line


def test_nccl_is_built_from_wheels_of_torchs_own_cuda_version(setup):
    setup.torch("2.15.0+cu1377", "13.77", "75,90")
    setup.toolkit("13.77", complete=False)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    # During the build, libraries have the names that Horovod's CMake files look for. FindPytorch is replaced only
    # in mode cpu.
    found = '[ -e "$CUDA_HOME/lib64/libcudart.so" ] && [ -e "$HOROVOD_NCCL_LIB/libnccl.so" ]'
    found += ' && [ ! -e "${HOROVOD_CMAKE%/*}/FindPytorch.cmake" ]'
    setup.set(pip=f'case "$*" in wheel*) {found} || exit 1 ;; esac')
    status, output, errors = setup.run(**NCCL)
    assert status == 0, errors
    assert "compiling Horovod 0.28.1 with NCCL, MPI and Gloo for torch 2.15.0+cu1377, sm_75, sm_90 during" in output
    (wheels,) = (call for call in setup.calls() if "nvidia-cuda-nvcc" in call)
    for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"):
        assert f"{name}==13.77.*" in wheels
    build = setup.build()
    assert (build["HOROVOD_GPU_OPERATIONS"], build["HOROVOD_NCCL_LINK"]) == ("NCCL", "SHARED")
    assert build["HOROVOD_BUILD_CUDA_CC_LIST"] == "75,90"
    assert build["NVCC_APPEND_FLAGS"] == "-std=c++20"
    assert build["CUDA_HOME"] == build["CUDAToolkit_ROOT"] == build["HOROVOD_CUDA_HOME"]
    assert build["PATH"].startswith(f"{build['CUDA_HOME']}/bin:")
    (wheel,) = (setup.cache / "wheels").iterdir()
    name = r"horovod.*-cpython-311-x86_64-torch2.15.0\+cu1377-openmpi4.1.8-recipe[0-9a-f]{8}-nccl-sm75,90"
    assert re.fullmatch(name, wheel.name)
    assert not list(setup.venv.glob("build.*"))


def test_a_wheel_is_kept_for_each_set_of_gpu_architectures(setup):
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit("13.77", complete=False)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    for capabilities in (["9.0", "8.0", "9.0"], ["12.0"]):
        setup.gpus(*capabilities)
        assert setup.run(DUALTRAIN_GPU="nccl", DUALTRAIN_WITH="none")[0] == 0
        (setup.venv / "setup.done").unlink()
    assert sorted(folder.name.rpartition("-")[2] for folder in (setup.cache / "wheels").iterdir()) == ["sm120", "sm80,90"]
    setup.calls()
    _, output, _ = setup.run(**NCCL)
    assert "was built before" in output
    assert not [call for call in setup.calls() if call.startswith("wheel ") or "nvcc" in call]


@pytest.mark.parametrize(("gpus", "mode"), [([], "cpu"), (["9.0"], "nccl")])
def test_the_default_mode_depends_on_the_machines_gpus(gpus, mode, setup):
    setup.gpus(*gpus)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    del setup.env["DUALTRAIN_GPU"]
    output, errors = setup.run(DUALTRAIN_WITH="none")[1:]
    assert f"({mode}) … done" in output
    assert ("a CPU build" in errors) == (mode == "nccl")


def test_a_toolkit_that_fits_is_used(setup):
    setup.torch("2.6.0+cu1277", "12.77")
    toolkit = setup.toolkit("12.77")
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    assert setup.run(**NCCL, CUDA_HOME=str(toolkit))[0] == 0
    assert setup.build()["CUDA_HOME"] == str(toolkit)
    assert not [call for call in setup.calls() if "nvcc" in call]


@pytest.mark.parametrize(
    ("version", "complete", "part"),
    [("12.4", True, "CUDA 12.4 in"), ("12.77", False, "CUDA 12.77 without include/cuda_runtime.h in"), (None, False, "")],
)
def test_cuda_12_needs_a_toolkit(version, complete, part, setup):
    setup.torch("2.6.0+cu1277", "12.77")
    env = {"CUDA_HOME": str(setup.toolkit(version, complete=complete))} if version else {}
    line = refusal(setup, **env)
    assert "torch 2.6.0+cu1277 needs the compiler of CUDA 12.77" in line
    assert "install CUDA toolkit 12.77 and set CUDA_HOME" in line
    assert part in line


def test_cuda_path_is_searched_if_the_toolkit_of_cuda_home_does_not_fit(setup):
    setup.torch("2.6.0+cu1277", "12.77")
    toolkit = setup.toolkit("12.77")
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    # The first folder's name begins with the second folder's name. The second one must still be searched.
    other = toolkit.with_name("toolkit-12.4")
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "nvcc").symlink_to("/bin/true")
    assert setup.run(**NCCL, CUDA_HOME=str(other), CUDA_PATH=str(toolkit))[0] == 0
    assert setup.build()["CUDA_HOME"] == str(toolkit)


def test_a_toolkit_that_does_not_fit_is_not_used_for_cuda_13(setup):
    setup.torch("2.15.0+cu1377", "13.77")
    toolkit = setup.toolkit("13.77", complete=False)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    status, output, errors = setup.run(**NCCL, CUDA_HOME=str(toolkit))
    assert status == 0, errors
    assert (
        f"not used, since torch 2.15.0+cu1377 is for CUDA 13.77: CUDA 13.77 without include/cuda_runtime.h in {toolkit}"
        in output
    )
    assert setup.build()["CUDA_HOME"] != str(toolkit)


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({}, "torch 2.13.0+cpu is a CPU build; set DUALTRAIN_TORCH"),
        ({"DUALTRAIN_GPU": "cuda"}, "DUALTRAIN_GPU=cuda is not known; set it to cpu or nccl, or unset it"),
        ({"DUALTRAIN_TORCH": "newest"}, "DUALTRAIN_TORCH=newest is not a version; set it to a version such as 2.15.0"),
        ({"DUALTRAIN_TORCH": "2.4.1"}, "DUALTRAIN_TORCH=2.4.1 is older than 2.5, the oldest version that dualtrain"),
    ],
)
def test_a_build_that_is_not_possible_is_refused_in_one_line(env, part, setup):
    assert part in refusal(setup, **env)


def test_bad_architectures_and_a_missing_nccl_are_refused_in_one_line(setup, tmp_path):
    setup.torch("2.15.0+cu1377", "13.77")
    assert "HOROVOD_BUILD_CUDA_CC_LIST=9.0 is not a list" in refusal(setup, HOROVOD_BUILD_CUDA_CC_LIST="9.0")
    assert f"no NCCL in {tmp_path} (include/nccl.h" in refusal(setup, HOROVOD_NCCL_HOME=str(tmp_path))


@pytest.mark.parametrize(
    ("version", "said", "part"),
    [
        ("13.78", "", "nvcc is of CUDA 13.78, but torch is of CUDA 13.77"),
        (
            "13.77",
            "x.h:1:\nx.h:9: error: -- unsupported GNU version!\n",
            "nvcc says: x.h:9: error: -- unsupported GNU version!",
        ),
    ],
)
def test_an_nvcc_that_cannot_be_used_is_refused_in_one_line(version, said, part, setup, tmp_path):
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit(version, complete=False)
    if said:
        (tmp_path / "nvcc").write_text(said)
    line = refusal(setup)
    assert part in line
    assert "set CXX to an older one" in line


def test_an_nvcc_that_does_not_run_is_refused_with_the_reason(setup):
    setup.torch("2.15.0+cu1377", "13.77")
    (setup.toolkit("13.77", complete=False) / "bin" / "nvcc").write_text("#!/no/interpreter\n")
    assert re.search("failed: nvcc cannot run: env: .*/bin/nvcc.*: No such file or directory; if", refusal(setup))


def test_a_horovod_without_nccl_is_refused(setup):
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit("13.77", complete=False)
    status, _, errors = setup.run(**NCCL)
    (line,) = errors.splitlines()
    assert (status, '--check-build" failed: Horovod was built without NCCL; delete' in line) == (2, True)


@pytest.mark.parametrize(
    ("said", "part"),
    [
        (
            "[Errno -3] Temporary failure in name resolution\nERROR: No matching distribution found for x",
            "the package index cannot be reached (Temporary failure in name resolution); set",
        ),
        (
            "ERROR: No matching distribution found for torch==2.99.0",
            "the package index has no torch==2.99.0 for this Python; set",
        ),
    ],
)
@pytest.mark.parametrize("step", [" torch==", "nvidia-cuda-nvcc", "wheel --no"])
def test_an_index_that_fails_is_reported_in_one_line(step, said, part, setup):
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit("13.77", complete=False)
    setup.set(pip=f'case "$* " in *"{step}"*) echo "{said}"; exit 1 ;; esac')
    status, _, errors = setup.run(**NCCL)
    (line,) = errors.splitlines()
    assert status == 2
    assert part in line


def test_the_requested_torch_version_is_installed_with_a_matching_torchvision(setup, tmp_path):
    assert setup.run(DUALTRAIN_WITH="none", DUALTRAIN_TORCH="2.14.0")[0] == 0
    pins = (tmp_path / "constraints").read_text().splitlines()
    assert [line for line in pins if line.startswith(("torch==", "torchvision=="))] == ["torch==2.14.0"]
    assert [call for call in setup.calls() if call.endswith(" torch==2.14.0+cpu")]
    # The environment for one version of torch is set up again for a different version.
    assert setup.run(DUALTRAIN_WITH="none", DUALTRAIN_TORCH="2.6.0")[0] == 0
    calls = setup.calls()
    assert [call for call in calls if call.endswith(" torch==2.6.0+cpu")]
    # pip would keep the installed Horovod, which has the same version but is built against a different torch.
    (wheel,) = (call for call in calls if call.endswith(".whl"))
    assert "--force-reinstall" in wheel


def test_torchvision_gets_the_cpu_build_of_the_version_that_fits_the_requested_torch(setup):
    setup.torch("2.14.0+cpu")
    setup.set(pip="""case "$*" in "show torchvision") echo "Version: 0.28.0" ;; esac""")
    assert setup.run(DUALTRAIN_WITH="none", DUALTRAIN_TORCH="2.14.0")[0] == 0
    assert "install --no-deps torchvision==0.28.0+cpu" in setup.calls()
    # A CUDA build of torch keeps the default build of torchvision.
    setup.torch("2.6.0+cu1277", "12.77")
    assert setup.run(DUALTRAIN_WITH="none", DUALTRAIN_TORCH="2.6.0")[0] == 0
    assert not [call for call in setup.calls() if "torchvision==0.28.0+cpu" in call]


def test_a_set_up_with_nccl_replaces_the_cpu_build_of_torch(setup):
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit("13.77", complete=False)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    (setup.venv / "lib/python3.11/site-packages/torch-2.15.0+cpu.dist-info").mkdir(parents=True)
    (setup.venv / "setup.done").touch()
    assert setup.run(**NCCL)[0] == 0
    calls = setup.calls()
    installed = next(call for call in calls if call.startswith("install") and " torch==" in call)
    assert calls.index("uninstall --yes torch") < calls.index(installed)
    assert "uninstall --yes torchvision" not in calls


def test_the_error_for_a_torch_version_that_the_index_lacks_names_the_version(setup):
    # With a constraint on torch, pip does not name the missing package.
    setup.set(
        pip="""case "$* " in
      *--constraint*" torch "* | *--constraint*" torch=="*) echo "ERROR: ResolutionImpossible: for help visit"; exit 1 ;;
      *" torch==2.99.0 "*) echo "ERROR: No matching distribution found for torch==2.99.0"; exit 1 ;;
    esac"""
    )
    status, _, errors = setup.run(DUALTRAIN_WITH="none", DUALTRAIN_TORCH="2.99.0")
    (line,) = errors.splitlines()
    assert (status, "the package index has no torch==2.99.0 for this Python; set" in line) == (2, True)


@pytest.mark.parametrize("abi", [1, 0])
def test_a_build_without_gpu_operations_imports_no_torch_and_needs_no_toolkit(abi, setup, tmp_path):
    setup.torch("2.15.0+cu1377", "13.77", abi=abi)
    setup.set(pip='case "$1" in wheel) cp "${HOROVOD_CMAKE%/*}/FindPytorch.cmake" "$here" ;; esac')
    status, output, errors = setup.run(DUALTRAIN_WITH="none")
    assert status == 0, errors
    assert "with MPI and Gloo for torch 2.15.0+cu1377 during" in output
    found = (tmp_path / "FindPytorch.cmake").read_text()
    assert 'set(Pytorch_VERSION "2.15.0+cu1377")' in found
    assert "set(Pytorch_CUDA FALSE)" in found
    assert f"_GLIBCXX_USE_CXX11_ABI={abi}" in found
    assert f"set(torch [[{tmp_path}/packages/torch]])" in found
    assert "CUDA_HOME" not in setup.build()


def test_only_an_nccl_build_waits_for_the_installation_of_torchs_dependencies(setup):
    # The dependencies' installation ends only when the build has begun.
    wait = 'until [ -e "$here/began" ]; do sleep 0.02; done'
    setup.set(
        pip=f"""case "$*" in wheel*) touch "$here/began" ;;
      *--no-deps*) ;; "install --disable-pip-version-check torch=="*) {wait} ;; esac"""
    )
    assert setup.run(DUALTRAIN_WITH="none")[0] == 0
    (whole,) = (call for call in setup.calls() if call == "install --disable-pip-version-check torch==2.15.0")
    setup.torch("2.15.0+cu1377", "13.77")
    setup.toolkit("13.77", complete=False)
    setup.horovod("PyTorch", "MPI", "Gloo", "NCCL")
    setup.set(pip="")
    assert setup.run(**NCCL)[0] == 0
    calls = setup.calls()
    first, compiler, build = (
        next(i for i, call in enumerate(calls) if part in call) for part in (whole, "nvidia-cuda-nvcc", "wheel --no")
    )
    assert first < compiler < build
