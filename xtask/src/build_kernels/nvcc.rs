//! The pinned CUDA compiler: where it is looked for, how it is installed, how it is called.

use super::manifest::Module;
use super::ptxas::{self, KernelUse};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What `nvcc --version` must name: newer PTX is refused by the drivers that GB10 and H200 machines run.
const RELEASE: &str = "release 13.0";

/// The compiler as PyPI serves it. No root and no CUDA toolkit are needed.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// nvcc and the ptxas beside it.
#[derive(Debug)]
pub(crate) struct Toolchain {
    /// Path of nvcc.
    pub(super) nvcc: PathBuf,
    ptxas: PathBuf,
}

impl Toolchain {
    /// The first nvcc of the right release among `NVCC`, `CUDA_HOME`, `PATH` and the one installed under `target_dir`;
    /// with `install`, one that is installed there.
    pub(crate) fn find(target_dir: &Path, install: bool) -> Result<Self> {
        let venv = target_dir.join("nvcc-venv");
        let mut seen = Vec::new();
        for nvcc in candidates(&venv) {
            match Self::at(&nvcc) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => seen.push(format!("{error:#}")),
            }
        }
        if install {
            install_into(&venv)?;
            let nvcc = installed(&venv)
                .with_context(|| format!("pip left no nvcc under {}", venv.display()))?;
            return Self::at(&nvcc);
        }
        let looked = if seen.is_empty() {
            String::new()
        } else {
            format!(" (looked at: {})", seen.join("; "))
        };
        bail!(
            "no nvcc of {RELEASE} by NVCC, CUDA_HOME or PATH{looked}; `cargo xtask build-kernels --install-nvcc` installs one"
        )
    }

    /// The toolchain of one nvcc, if it is of the right release and has a ptxas beside it.
    fn at(nvcc: &Path) -> Result<Self> {
        let version = text(&run(Command::new(nvcc).arg("--version"))?.stdout);
        if !version.contains(RELEASE) {
            let named = version
                .lines()
                .find(|l| l.contains("release"))
                .unwrap_or("of no known release");
            bail!("{} is {named}, not {RELEASE}", nvcc.display());
        }
        let ptxas = nvcc.with_file_name("ptxas");
        if !ptxas.is_file() {
            bail!("{} has no ptxas beside it", nvcc.display());
        }
        Ok(Self {
            nvcc: nvcc.to_path_buf(),
            ptxas,
        })
    }

    /// PTX of one module. Runs in the kernels folder on relative paths, so that the text does not depend on where the
    /// repository lies.
    pub(super) fn compile(&self, kernels: &Path, module: &Module, arch: &str) -> Result<String> {
        let scratch = tempfile::tempdir()?;
        let out = scratch.path().join("out.ptx");
        let mut command = Command::new(&self.nvcc);
        command
            .current_dir(kernels)
            .arg("-ptx")
            .arg(format!("-arch={arch}"));
        command
            .args(["-std=c++17", "-O3", "-I", "include"])
            .arg(format!("src/{}", module.file))
            .arg("-o")
            .arg(&out);
        let output = run(&mut command)?;
        let warnings = text(&output.stderr);
        if !warnings.trim().is_empty() {
            eprintln!("{}", warnings.trim_end());
        }
        Ok(std::fs::read_to_string(&out)?)
    }

    /// Assembles PTX for an architecture and gives what ptxas says each kernel takes.
    pub(super) fn assemble(&self, ptx: &str, arch: &str) -> Result<Vec<KernelUse>> {
        let scratch = tempfile::tempdir()?;
        let (source, out) = (
            scratch.path().join("in.ptx"),
            scratch.path().join("out.cubin"),
        );
        std::fs::write(&source, ptx)?;
        let mut command = Command::new(&self.ptxas);
        command
            .arg("-v")
            .arg(format!("-arch={arch}"))
            .arg(&source)
            .arg("-o")
            .arg(&out);
        ptxas::parse(&text(&run(&mut command)?.stderr))
    }
}

/// Places to look, in order of precedence.
fn candidates(venv: &Path) -> Vec<PathBuf> {
    let named = std::env::var_os("NVCC")
        .filter(|v| !v.is_empty())
        .map(PathBuf::from);
    let home = std::env::var_os("CUDA_HOME")
        .filter(|v| !v.is_empty())
        .map(|home| PathBuf::from(home).join("bin/nvcc"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path)
        .map(|dir| dir.join("nvcc"))
        .find(|nvcc| nvcc.is_file());
    [named, home, on_path, installed(venv)]
        .into_iter()
        .flatten()
        .collect()
}

/// nvcc inside the venv, whatever Python made it.
fn installed(venv: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(venv.join("lib")).ok()?;
    let mut found = versions
        .filter_map(|entry| {
            Some(
                entry
                    .ok()?
                    .path()
                    .join("site-packages/nvidia/cu13/bin/nvcc"),
            )
        })
        .filter(|nvcc| nvcc.is_file());
    found.next()
}

/// Installs the pinned packages into a fresh venv.
fn install_into(venv: &Path) -> Result<()> {
    println!("installing nvcc into {}", venv.display());
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(venv))
    .context("a Python venv is needed for nvcc")?;
    run(Command::new(venv.join("bin/python"))
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .args(PACKAGES))?;
    Ok(())
}

/// Runs to the end; a failure carries the command and what it printed.
fn run(command: &mut Command) -> Result<Output> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| shown.clone())?;
    if !output.status.success() {
        bail!(
            "{shown}: {}\n{}{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
    }
    Ok(output)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
