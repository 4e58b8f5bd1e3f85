//! What PEFT itself gave for a model and an adapter, to compare an engine with.

use crate::EngineError;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// The whole model's answer, recorded from PEFT in F32: `logits.safetensors` of a case in `tests/data/cases`.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Prompts of equal length.
    pub prompts: Vec<Vec<u32>>,
    /// `[prompt][token][vocabulary]` without the adapter.
    pub base: Vec<Vec<Vec<f32>>>,
    /// The same with the adapter.
    pub adapted: Vec<Vec<Vec<f32>>>,
}

impl Recorded {
    /// Reads `logits.safetensors` in `dir`; `None` where there is none.
    ///
    /// # Errors
    /// [`EngineError::File`] for a file that is not as described.
    pub fn open(dir: &Path) -> Result<Option<Self>, EngineError> {
        let path = dir.join("logits.safetensors");
        if !path.exists() {
            return Ok(None);
        }
        let bytes = std::fs::read(&path).map_err(|error| EngineError::file(&path, error))?;
        Self::parse(&bytes)
            .map(Some)
            .map_err(|error| EngineError::file(&path, error))
    }

    fn parse(bytes: &[u8]) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let file = SafeTensors::deserialize(bytes)?;
        let ids = file.tensor("input_ids")?;
        let &[prompts, length] = ids.shape() else {
            return Err(format!("input_ids is {:?}, not [prompts, tokens]", ids.shape()).into());
        };
        let logits =
            |name: &str| -> Result<Vec<Vec<Vec<f32>>>, Box<dyn std::error::Error + Send + Sync>> {
                let view = file.tensor(name)?;
                let &[_, _, vocab] = view.shape() else {
                    return Err(format!("{name} is {:?}", view.shape()).into());
                };
                if view.dtype() != Dtype::F32 || view.shape() != [prompts, length, vocab] {
                    return Err(
                        format!("{name} is {:?} of {:?}", view.shape(), view.dtype()).into(),
                    );
                }
                let (words, _) = view.data().as_chunks::<4>();
                let values: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
                let rows: Vec<Vec<f32>> = values.chunks_exact(vocab).map(<[f32]>::to_vec).collect();
                Ok(rows
                    .chunks_exact(length)
                    .map(<[Vec<f32>]>::to_vec)
                    .collect())
            };
        let (words, _) = ids.data().as_chunks::<8>();
        let tokens: Vec<u32> = words
            .iter()
            .map(|word| u32::try_from(i64::from_le_bytes(*word)))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            prompts: tokens.chunks_exact(length).map(<[u32]>::to_vec).collect(),
            base: logits("logits_base")?,
            adapted: logits("logits_adapted")?,
        })
    }
}

/// Root mean square of the misses of `got`, as a part of the root mean square of `wanted`.
pub fn relative_error(got: &[Vec<f32>], wanted: &[Vec<f32>]) -> f32 {
    let pairs = || got.iter().flatten().zip(wanted.iter().flatten());
    let miss: f32 = pairs().map(|(got, wanted)| (got - wanted).powi(2)).sum();
    let size: f32 = pairs().map(|(_, wanted)| wanted.powi(2)).sum();
    (miss / size).sqrt()
}
