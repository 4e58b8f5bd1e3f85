//! A model's tensors, by name, each taken once.

use crate::EngineError;
use crate::math::{Linear, RmsNorm, Rows};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::HashMap;
use std::path::Path;

/// The tensors of a model folder, widened to F32. What is never taken is an error at the end, so that no weight of the model is
/// silently without effect.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Checkpoint {
    /// Reads every `*.safetensors` in `dir`.
    ///
    /// # Errors
    /// [`EngineError::File`] for a file that cannot be read or is none; [`EngineError::Tensor`] for a dtype that is not F32, F16
    /// or BF16.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let in_dir = |error| EngineError::file(dir, error);
        let mut tensors = HashMap::new();
        for entry in std::fs::read_dir(dir).map_err(in_dir)? {
            let path = entry.map_err(in_dir)?.path();
            if path
                .extension()
                .is_none_or(|extension| extension != "safetensors")
            {
                continue;
            }
            let bytes = std::fs::read(&path).map_err(|error| EngineError::file(&path, error))?;
            let file = SafeTensors::deserialize(&bytes)
                .map_err(|error| EngineError::file(&path, error))?;
            for (name, view) in file.iter() {
                let values = widen(&view).ok_or_else(|| {
                    tensor_error(
                        name,
                        format!("{:?} is none of F32, F16, BF16", view.dtype()),
                    )
                })?;
                tensors.insert(name.to_owned(), (view.shape().to_vec(), values));
            }
        }
        Ok(Self { tensors })
    }

    /// Whether `name` is there to be taken.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The values of a tensor of this shape.
    ///
    /// # Errors
    /// [`EngineError::Tensor`] where it is not there or of another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        match self.tensors.remove(name) {
            None => Err(tensor_error(name, "is not in the model's files")),
            Some((found, _)) if found != shape => Err(tensor_error(
                name,
                format!("is {found:?}, the model has {shape:?}"),
            )),
            Some((_, values)) => Ok(values),
        }
    }

    /// A projection called `name` (without `.weight`).
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn linear(
        &mut self,
        name: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Linear, EngineError> {
        let weight = self.take(&format!("{name}.weight"), &[outputs, inputs])?;
        Ok(Linear::new(Rows::new(inputs, weight)))
    }

    /// A norm called `name`, its weights stored less `offset`.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn norm(
        &mut self,
        name: &str,
        width: usize,
        (offset, eps): (f32, f32),
    ) -> Result<RmsNorm, EngineError> {
        let mut weight = self.take(&format!("{name}.weight"), &[width])?;
        weight.iter_mut().for_each(|weight| *weight += offset);
        Ok(RmsNorm::new(weight, eps))
    }

    /// Everything was taken.
    ///
    /// # Errors
    /// [`EngineError::Tensor`], naming one that was not.
    pub fn finish(self) -> Result<(), EngineError> {
        match self.tensors.keys().min() {
            None => Ok(()),
            Some(name) => Err(tensor_error(name, "belongs to no block of this engine")),
        }
    }
}

fn widen(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let (words, _) = view.data().as_chunks::<2>();
    Some(match view.dtype() {
        Dtype::F32 => {
            let (words, _) = view.data().as_chunks::<4>();
            words.iter().map(|word| f32::from_le_bytes(*word)).collect()
        }
        Dtype::F16 => words
            .iter()
            .map(|word| f16::from_le_bytes(*word).to_f32())
            .collect(),
        Dtype::BF16 => words
            .iter()
            .map(|word| bf16::from_le_bytes(*word).to_f32())
            .collect(),
        _ => return None,
    })
}

fn tensor_error(name: &str, problem: impl Into<String>) -> EngineError {
    EngineError::Tensor {
        name: name.to_owned(),
        problem: problem.into(),
    }
}
