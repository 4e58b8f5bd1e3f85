//! The base model with an adapter's deltas added to its weights: what its own BF16 error is measured on.

use lora_tests::case_dir;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

/// Shape and values by name.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The weights of `base`.
pub(crate) fn read_model(base: &str) -> Tensors {
    read(&case_dir(base).join("model.safetensors"))
}

/// The weights of `base` with the adapter of `case` merged into them in F32, from the files alone.
pub(crate) fn merged(base: &str, case: &str) -> Tensors {
    let mut model = read_model(base);
    let adapter = read(&case_dir(case).join("adapter/adapter_model.safetensors"));
    let scalings = scalings(case);
    for (name, (shape, a)) in &adapter {
        let name_in_model = name
            .strip_prefix("base_model.model.")
            .expect("PEFT's prefix");
        let Some(module) = name_in_model.strip_suffix(".lora_A.weight") else {
            // A whole table stands under the parameter's own name.
            if let Some(table) = model.get_mut(name_in_model) {
                *table = (shape.clone(), a.clone());
            }
            continue;
        };
        let (_, b) = &adapter[&name.replace("lora_A", "lora_B")];
        let (parameter, module) = parameter_of(module);
        let (shape, weight) = model.get_mut(&parameter).expect("the base model has it");
        let delta = Delta {
            a,
            b,
            experts: shape[..shape.len() - 2].iter().product(),
            inputs: shape[shape.len() - 1],
        };
        for (at, weight) in weight.iter_mut().enumerate() {
            *weight += scalings[module] * delta.at(at);
        }
    }
    model
}

/// The parameter that a module's pair adapts, and the module that `case.json` lists it under: PEFT wraps the two parameters of
/// stacked experts one in the other, gate_up innermost.
fn parameter_of(module: &str) -> (String, &str) {
    if let Some(experts) = module.strip_suffix(".experts.base_layer") {
        return (
            format!("{experts}.experts.gate_up_proj"),
            &module[..module.len() - ".base_layer".len()],
        );
    }
    match module.ends_with(".experts") {
        true => (format!("{module}.down_proj"), module),
        false => (format!("{module}.weight"), module),
    }
}

/// A pair, of one matrix or of stacked ones: A is expert-major, B rank-major.
struct Delta<'a> {
    a: &'a [f32],
    b: &'a [f32],
    experts: usize,
    inputs: usize,
}

impl Delta<'_> {
    /// B A at this element of the parameter, scaling left out.
    fn at(&self, at: usize) -> f32 {
        let rank = self.a.len() / self.inputs / self.experts;
        let outputs = self.b.len() / rank / self.experts;
        let (row, input) = (at / self.inputs, at % self.inputs);
        let (expert, output) = (row / outputs, row % outputs);
        let b = |r: usize| self.b[output * rank * self.experts + r * self.experts + expert];
        let a = |r: usize| self.a[(expert * rank + r) * self.inputs + input];
        (0..rank).map(|r| b(r) * a(r)).sum()
    }
}

/// Moves every weight by up to one part in 256, as rounding to BF16 does.
pub(crate) fn jitter(model: &mut Tensors, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for (_, values) in model.values_mut() {
        for value in values {
            *value *= 1.0 + (random.f32() * 2.0 - 1.0) / 256.0;
        }
    }
}

/// Scaling of each dense module and router, by path.
fn scalings(case: &str) -> BTreeMap<String, f32> {
    let text = std::fs::read_to_string(case_dir(case).join("case.json")).expect("is there");
    let json: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
    let modules = json["modules"].as_array().expect("a list").iter();
    let scaling = |module: &serde_json::Value| {
        let path = module["module"].as_str().expect("a path").to_owned();
        (path, module["scaling"].as_f64().expect("a number") as f32)
    };
    modules.map(scaling).collect()
}

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).expect("the file is there");
    let file = SafeTensors::deserialize(&bytes).expect("the file is safetensors");
    let f32s = file.iter().filter(|(_, view)| view.dtype() == Dtype::F32);
    let tensors = f32s.map(|(name, view)| {
        let (words, _) = view.data().as_chunks::<4>();
        let values = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        (name.to_owned(), (view.shape().to_vec(), values))
    });
    tensors.collect()
}

/// A model folder of these weights.
pub(crate) fn write(base: &str, model: &Tensors) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = case_dir(base).join("config.json");
    std::fs::copy(config, dir.path().join("config.json")).expect("is copied");
    let bytes = model.iter().map(|(name, (shape, values))| {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        (name, shape, bytes)
    });
    let bytes: Vec<_> = bytes.collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("sizes agree");
        (name.as_str(), view)
    });
    serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("is written");
    dir
}
