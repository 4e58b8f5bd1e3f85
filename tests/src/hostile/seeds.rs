//! What fuzzing starts from: recorded cases as inputs of the targets, and corpora, many small inputs in one file.

use super::CONFIGS;
use std::path::Path;

/// An input of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seed {
    /// The target.
    pub target: &'static str,
    /// What tells it from other seeds of the case; empty where there is one.
    pub label: String,
    /// The input.
    pub bytes: Vec<u8>,
}

impl Seed {
    fn new(target: &'static str, bytes: Vec<u8>) -> Self {
        Self {
            target,
            label: String::new(),
            bytes,
        }
    }
}

/// The seeds that one recorded case gives: files that it lacks give none.
pub fn seeds_of(case: &Path) -> Vec<Seed> {
    let read = |file: &str| std::fs::read(case.join(file)).ok();
    let mut seeds = Vec::new();
    let mut which = 0;
    if let Some(model) = read("config.json") {
        which = model_byte(&model).unwrap_or(0);
        seeds.push(Seed::new("model_config", model));
    }
    let config = read("adapter/adapter_config.json").unwrap_or_default();
    if !config.is_empty() {
        seeds.push(Seed::new("adapter_config", config.clone()));
    }
    let Some(weights) = read("adapter/adapter_model.safetensors") else {
        return seeds;
    };
    // Everything permitted, so that the checks behind the permissions are reached.
    let mut folder = vec![which, 0b0001_0011];
    folder.extend((config.len() as u16).to_le_bytes());
    folder.extend(&config);
    folder.extend(&weights);
    seeds.push(Seed::new("landing_plan", folder.clone()));
    seeds.push(Seed::new("adapter_folder", folder));
    let Some((length, rest)) = weights.split_first_chunk::<8>() else {
        return seeds;
    };
    let length = u64::from_le_bytes(*length) as usize;
    let Some((header, data)) = rest.split_at_checked(length) else {
        return seeds;
    };
    let mut sized = (data.len() as u32).to_le_bytes().to_vec();
    sized.extend(header);
    seeds.push(Seed::new("safetensors_header", sized));
    let names = serde_json::from_slice::<serde_json::Map<_, _>>(header);
    for (at, name) in names.unwrap_or_default().keys().enumerate() {
        let mut bytes = vec![which, 1];
        bytes.extend(name.as_bytes());
        seeds.push(Seed {
            label: format!("-{at}"),
            ..Seed::new("tensor_names", bytes)
        });
    }
    seeds
}

/// The byte that names the model of this `config.json`; `None` where it is none of those that bodies use.
fn model_byte(config: &[u8]) -> Option<u8> {
    let same = |text: &&str| text.as_bytes() == config;
    let at = CONFIGS.iter().position(same)?;
    u8::try_from(at).ok()
}

/// Inputs as one file: each behind its length, four bytes little-endian.
pub fn pack_corpus<'a>(inputs: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut file = Vec::new();
    for input in inputs {
        file.extend((input.len() as u32).to_le_bytes());
        file.extend(input);
    }
    file
}

/// The inputs of a corpus, as [`pack_corpus`] put them there; `None` where the file was cut.
pub fn unpack_corpus(mut file: &[u8]) -> Option<Vec<&[u8]>> {
    let mut inputs = Vec::new();
    while !file.is_empty() {
        let (length, rest) = file.split_first_chunk::<4>()?;
        let (input, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        inputs.push(input);
        file = rest;
    }
    Some(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corpus_gives_its_inputs_back_and_a_cut_one_nothing() {
        let inputs: [&[u8]; 3] = [b"one", b"", b"three"];
        let file = pack_corpus(inputs);
        assert_eq!(unpack_corpus(&file).as_deref(), Some(&inputs[..]));
        assert_eq!(unpack_corpus(&file[..file.len() - 1]), None);
    }
}
