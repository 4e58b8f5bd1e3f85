//! What tests that cross crates share: the recorded cases, and the command line in process.

#![forbid(unsafe_code)]

pub mod faulty;
pub mod hostile;
pub mod peer;

use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView, serialize_to_file};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The test data: `LORA_TEST_DATA` where a bundle carries it, else the folder beside this crate.
pub fn data_dir() -> PathBuf {
    match std::env::var_os("LORA_TEST_DATA") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("data"),
    }
}

/// The folder of one recorded case.
pub fn case_dir(name: &str) -> PathBuf {
    data_dir().join("cases").join(name)
}

/// A case of the index: its name and what a strict loader does with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexEntry {
    /// Name of its folder.
    pub name: String,
    /// `ok`, `refuse`, `token_rows`, ...
    pub expect: String,
}

impl IndexEntry {
    /// Whether the file is one to load.
    pub fn is_ok(&self) -> bool {
        self.expect.starts_with("ok") && self.expect != "ok_or_refuse_dtype"
    }
}

/// Every case of the index.
///
/// # Panics
/// Where the index is not there or not what it was.
pub fn index() -> Vec<IndexEntry> {
    let text =
        std::fs::read_to_string(data_dir().join("cases/index.json")).expect("the index is there");
    let index: Value = serde_json::from_str(&text).expect("the index is JSON");
    let text_of = |case: &Value, key: &str| case[key].as_str().expect("a string").to_owned();
    let cases = index["cases"].as_array().expect("a list").iter();
    cases
        .map(|case| IndexEntry {
            name: text_of(case, "case"),
            expect: text_of(case, "expect"),
        })
        .collect()
}

/// Whether this machine has a CUDA device that tests can run on. Says that the test called `test` is skipped, and why,
/// where it has none.
///
/// # Panics
/// Where there is none and `LORA_REQUIRE_CUDA` is 1, as on a machine that is there to run these tests.
pub fn has_cuda(test: &str) -> bool {
    let Err(missing) = lora_runtime::open_backend(lora_runtime::config::BackendKind::Cuda) else {
        return true;
    };
    let required = std::env::var("LORA_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    assert!(!required, "{test}: {missing}");
    eprintln!("skipped {test}: {missing}");
    false
}

/// What a command line gave.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code.
    pub code: u8,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl CommandOutput {
    /// Standard output as JSON.
    ///
    /// # Panics
    /// Where it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out)
            .unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }

    /// Reasons of the error findings in the JSON of an audit or of the first case of a verify.
    pub fn error_reasons(&self) -> Vec<String> {
        let json = self.json();
        let findings = if json["findings"].is_array() {
            &json["findings"]
        } else {
            &json["cases"][0]["findings"]
        };
        let errors = findings
            .as_array()
            .into_iter()
            .flatten()
            .filter(|finding| finding["level"] == "error");
        errors
            .map(|finding| finding["reason"].as_str().unwrap_or_default().to_owned())
            .collect()
    }
}

/// Runs `lora` with these arguments in process.
pub fn lora<S: AsRef<str>>(arguments: &[S]) -> CommandOutput {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let words: Vec<&str> = std::iter::once("lora")
        .chain(arguments.iter().map(AsRef::as_ref))
        .collect();
    let code = lora_cli::run(words, &mut lora_cli::Console::plain(&mut out, &mut err));
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    CommandOutput {
        code,
        out: text(out),
        err: text(err),
    }
}

/// A copy of a case in a temporary folder, to damage.
#[derive(Debug)]
pub struct CaseCopy {
    dir: tempfile::TempDir,
}

impl CaseCopy {
    /// Copies the case called `name`.
    ///
    /// # Panics
    /// Where it cannot be copied.
    pub fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(dir.path().join("adapter")).expect("folder is made");
        let files = [
            "config.json",
            "golden.safetensors",
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
        ];
        for file in files {
            std::fs::copy(case_dir(name).join(file), dir.path().join(file))
                .expect("file is copied");
        }
        Self { dir }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The folder, as an argument.
    pub fn argument(&self) -> String {
        self.path().display().to_string()
    }

    /// Changes the adapter's config.
    ///
    /// # Panics
    /// Where it is not there or no JSON.
    pub fn edit_config(&self, edit: impl FnOnce(&mut Value)) {
        edit_json(&self.path().join("adapter/adapter_config.json"), edit);
    }

    /// Changes the base model's config.
    ///
    /// # Panics
    /// Where it is not there or no JSON.
    pub fn edit_model(&self, edit: impl FnOnce(&mut Value)) {
        edit_json(&self.path().join("config.json"), edit);
    }

    /// Adds an F32 tensor to the recorded ones.
    ///
    /// # Panics
    /// Where the file cannot be rewritten.
    pub fn add_golden(&self, name: &str, shape: &[usize], values: &[f32]) {
        let path = self.path().join("golden.safetensors");
        let mut tensors = read_tensors(&path);
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        tensors.push((name.to_owned(), Dtype::F32, shape.to_vec(), data));
        write_tensors(&path, &tensors);
    }

    /// Changes the F32 values of every tensor of the adapter whose name ends with `suffix`. `edit` is given the shape.
    ///
    /// # Panics
    /// Where there is no such tensor.
    pub fn edit_adapter(&self, suffix: &str, edit: impl FnMut(&[usize], &mut [f32])) {
        edit_tensors(
            &self.path().join("adapter/adapter_model.safetensors"),
            suffix,
            edit,
        );
    }

    /// Changes the F32 values of every golden tensor whose name ends with `suffix`. `edit` is given the shape.
    ///
    /// # Panics
    /// Where there is no such tensor.
    pub fn edit_golden(&self, suffix: &str, edit: impl FnMut(&[usize], &mut [f32])) {
        edit_tensors(&self.path().join("golden.safetensors"), suffix, edit);
    }
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let text = std::fs::read_to_string(path).expect("the config is there");
    let mut config: Value = serde_json::from_str(&text).expect("the config is JSON");
    edit(&mut config);
    std::fs::write(path, config.to_string()).expect("the config is written");
}

/// Name, dtype, shape and bytes of a tensor.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn read_tensors(path: &Path) -> Vec<Tensor> {
    let bytes = std::fs::read(path).expect("the file is there");
    let file = SafeTensors::deserialize(&bytes).expect("the file is safetensors");
    let tensor = |(name, view): (&str, TensorView<'_>)| {
        let shape = view.shape().to_vec();
        (name.to_owned(), view.dtype(), shape, view.data().to_vec())
    };
    file.iter().map(tensor).collect()
}

fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = TensorView::new(*dtype, shape.clone(), data);
        (name.as_str(), view.expect("sizes agree"))
    });
    serialize_to_file(views, None, path).expect("the file is written");
}

/// F32 values of little-endian bytes.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The F32 values of the tensor of a safetensors file whose name is `name`.
///
/// # Panics
/// Where there is no such file or tensor.
pub fn read_f32(path: &Path, name: &str) -> Vec<f32> {
    let tensors = read_tensors(path);
    let found = tensors.iter().find(|tensor| tensor.0 == name);
    floats(
        &found
            .unwrap_or_else(|| panic!("{}: no {name}", path.display()))
            .3,
    )
}

/// Rewrites a safetensors file with the F32 values of every tensor whose name ends with `suffix` changed.
fn edit_tensors(path: &Path, suffix: &str, mut edit: impl FnMut(&[usize], &mut [f32])) {
    let mut tensors = read_tensors(path);
    let mut changed = 0;
    for (_, _, shape, data) in tensors.iter_mut().filter(|t| t.0.ends_with(suffix)) {
        let mut values = floats(data);
        edit(shape, &mut values);
        *data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        changed += 1;
    }
    assert!(changed > 0, "no tensor ends with {suffix}");
    write_tensors(path, &tensors);
}
