//! `kernels/KERNEL.toml`: targets, modules, and the shared memory that launches ask for.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A chip that PTX is built for.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Name in KERNEL.toml and of the folder under `ptx/`.
    pub(super) name: String,
    /// nvcc's `-arch`.
    pub(super) arch: String,
    /// Largest shared memory of a block, bytes.
    pub(super) shared_bytes: u64,
}

/// One source file and the name its PTX goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Module {
    /// Name of the PTX file, without extension.
    pub(super) name: String,
    /// File under `src/`.
    pub(super) file: String,
    /// The one target that it is built for, where it is not all.
    own: Option<OwnArch>,
}

impl Module {
    /// nvcc's `-arch` for `target`; `None` where the module is not built for it.
    pub(super) fn arch_on<'a>(&'a self, target: &'a Target) -> Option<&'a str> {
        match &self.own {
            None => Some(&target.arch),
            Some(own) => (own.target == target.name).then_some(&own.arch),
        }
    }
}

/// A target and its architecture with the instructions that later ones lack.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnArch {
    target: String,
    arch: String,
}

/// The parsed file, with the modules that it leaves to their stems.
#[derive(Debug)]
pub(super) struct Manifest {
    /// Targets by name.
    pub(super) targets: Vec<Target>,
    /// Modules by name.
    pub(super) modules: Vec<Module>,
    dynamic: BTreeMap<String, PerTarget>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    targets: BTreeMap<String, TargetEntry>,
    #[serde(default)]
    modules: BTreeMap<String, String>,
    #[serde(default)]
    dynamic_shared_bytes: BTreeMap<String, PerTarget>,
    #[serde(default)]
    own_arch: BTreeMap<String, OwnArch>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetEntry {
    arch: String,
    shared_bytes: u64,
}

/// Dynamic shared memory of a kernel: one number, or one a target.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PerTarget {
    All(u64),
    Each(BTreeMap<String, u64>),
}

impl Manifest {
    /// Reads `KERNEL.toml` of a kernels folder and lists `src/`.
    pub(super) fn load(kernels: &Path) -> Result<Self> {
        let path = kernels.join("KERNEL.toml");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let file: File = toml::from_str(&text).with_context(|| path.display().to_string())?;
        let mut sources = Vec::new();
        for entry in std::fs::read_dir(kernels.join("src"))
            .with_context(|| format!("{}/src", kernels.display()))?
        {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".cu") {
                sources.push(name);
            }
        }
        let targets = file.targets.into_iter().map(|(name, entry)| Target {
            name,
            arch: entry.arch,
            shared_bytes: entry.shared_bytes,
        });
        let mut modules = modules(file.modules, sources)?;
        let targets: Vec<Target> = targets.collect();
        for (name, own) in file.own_arch {
            let Some(module) = modules.iter_mut().find(|module| module.name == name) else {
                bail!("KERNEL.toml: own_arch of {name}, which is no module");
            };
            if !targets.iter().any(|target| target.name == own.target) {
                bail!(
                    "KERNEL.toml: own_arch of {name} on {}, which is no target",
                    own.target
                );
            }
            module.own = Some(own);
        }
        Ok(Self {
            targets,
            modules,
            dynamic: file.dynamic_shared_bytes,
        })
    }

    /// The target named `name`, or all of them.
    pub(super) fn select(&self, name: &str) -> Result<Vec<Target>> {
        let chosen: Vec<Target> = self
            .targets
            .iter()
            .filter(|t| name == "all" || t.name == name)
            .cloned()
            .collect();
        if chosen.is_empty() {
            let known: Vec<&str> = self.targets.iter().map(|t| t.name.as_str()).collect();
            bail!(
                "no target {name:?} in KERNEL.toml; it has {}",
                known.join(", ")
            );
        }
        Ok(chosen)
    }

    /// Most dynamic shared memory that a launch of `kernel` asks for on `target`.
    pub(super) fn dynamic_shared(&self, kernel: &str, target: &Target) -> u64 {
        match self.dynamic.get(kernel) {
            None => 0,
            Some(PerTarget::All(bytes)) => *bytes,
            Some(PerTarget::Each(by_target)) => by_target.get(&target.name).copied().unwrap_or(0),
        }
    }

    /// Declarations for kernels that no module holds.
    pub(super) fn unknown_kernels<'a>(
        &self,
        kernels: impl Iterator<Item = &'a str>,
    ) -> Vec<String> {
        let known: Vec<&str> = kernels.collect();
        let unknown = self
            .dynamic
            .keys()
            .filter(|name| !known.contains(&name.as_str()));
        unknown
            .map(|name| {
                format!("KERNEL.toml declares shared memory for {name}, which is no kernel")
            })
            .collect()
    }
}

/// Listed modules, then a module for every file that none of them names.
fn modules(listed: BTreeMap<String, String>, sources: Vec<String>) -> Result<Vec<Module>> {
    if let Some((name, file)) = listed.iter().find(|(_, file)| !sources.contains(file)) {
        bail!("KERNEL.toml: module {name} is {file}, which is not in kernels/src");
    }
    let unlisted = sources
        .iter()
        .filter(|file| !listed.values().any(|f| f == *file));
    let mut all: Vec<Module> = unlisted
        .map(|file| Module {
            name: file.trim_end_matches(".cu").to_owned(),
            file: file.clone(),
            own: None,
        })
        .collect();
    if let Some(taken) = all.iter().find(|module| listed.contains_key(&module.name)) {
        bail!(
            "KERNEL.toml: module {} is listed with another file than {}",
            taken.name,
            taken.file
        );
    }
    all.extend(listed.into_iter().map(|(name, file)| Module {
        name,
        file,
        own: None,
    }));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries
            .iter()
            .map(|(name, file)| ((*name).to_owned(), (*file).to_owned()))
            .collect()
    }

    #[test]
    fn unlisted_files_go_by_their_stem() {
        let built = modules(
            map(&[("lora", "delta.cu")]),
            vec!["delta.cu".into(), "group.cu".into()],
        )
        .expect("valid");
        let names: Vec<(&str, &str)> = built
            .iter()
            .map(|m| (m.name.as_str(), m.file.as_str()))
            .collect();
        assert_eq!(names, [("group", "group.cu"), ("lora", "delta.cu")]);
    }

    #[test]
    fn listed_file_that_is_missing_and_name_taken_twice_are_errors() {
        let missing = modules(map(&[("lora", "gone.cu")]), vec![]).expect_err("no such file");
        assert!(missing.to_string().contains("gone.cu"), "{missing}");
        let twice = modules(
            map(&[("group", "delta.cu")]),
            vec!["delta.cu".into(), "group.cu".into()],
        );
        assert!(twice.expect_err("name taken").to_string().contains("group"));
    }

    #[test]
    fn module_with_an_own_arch_is_built_for_its_target_alone() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(dir.path().join("src")).expect("folder is made");
        for file in ["all.cu", "one.cu"] {
            std::fs::write(dir.path().join("src").join(file), "").expect("file is written");
        }
        let load = |own: &str| {
            let targets = "[targets]\ngb10 = { arch = \"sm_121\", shared_bytes = 101376 }\n\
                           h200 = { arch = \"sm_90\", shared_bytes = 232448 }\n";
            let text = format!("{targets}[own_arch]\n{own}\n");
            std::fs::write(dir.path().join("KERNEL.toml"), text).expect("file is written");
            Manifest::load(dir.path())
        };
        let manifest = load("one = { target = \"h200\", arch = \"sm_90a\" }").expect("valid");
        let arch = |module: usize, target: usize| {
            manifest.modules[module].arch_on(&manifest.targets[target])
        };
        assert_eq!((arch(0, 0), arch(0, 1)), (Some("sm_121"), Some("sm_90")));
        assert_eq!((arch(1, 0), arch(1, 1)), (None, Some("sm_90a")));
        let no_module = load("two = { target = \"h200\", arch = \"sm_90a\" }");
        assert!(
            no_module
                .expect_err("no such module")
                .to_string()
                .contains("two")
        );
        let no_target = load("one = { target = \"b200\", arch = \"sm_100a\" }");
        assert!(
            no_target
                .expect_err("no such target")
                .to_string()
                .contains("b200")
        );
    }

    #[test]
    fn unknown_key_and_unknown_target_are_errors() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(dir.path().join("src")).expect("folder is made");
        let good = "[targets]\nh200 = { arch = \"sm_90\", shared_bytes = 232448 }\n";
        std::fs::write(dir.path().join("KERNEL.toml"), good).expect("file is written");
        let manifest = Manifest::load(dir.path()).expect("valid");
        let error = manifest.select("b200").expect_err("no such target");
        assert!(error.to_string().contains("h200"), "{error}");
        std::fs::write(
            dir.path().join("KERNEL.toml"),
            format!("{good}[speed]\na = 1\n"),
        )
        .expect("file is written");
        assert!(Manifest::load(dir.path()).is_err());
    }
}
