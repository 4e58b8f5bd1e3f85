//! A PEFT adapter of a Llama of any size, written the way PEFT writes one, filled with random BF16 values.

use crate::CliError;
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Sizes of the model that the adapter is for, and its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Decoder layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Width of k and v.
    pub kv: usize,
    /// FFN width.
    pub ffn: usize,
    /// Rank of every module.
    pub rank: usize,
}

impl Shape {
    /// A Llama of 8 billion parameters, rank 64: 335 MB of BF16.
    pub const LLAMA_8B: Self = Self {
        layers: 32,
        hidden: 4096,
        kv: 1024,
        ffn: 14336,
        rank: 64,
    };

    /// A few kilobytes, for tests.
    pub const TINY: Self = Self {
        layers: 2,
        hidden: 256,
        kv: 128,
        ffn: 512,
        rank: 8,
    };

    /// (module, out, in) of the seven projections of a layer.
    fn modules(&self) -> [(&'static str, usize, usize); 7] {
        [
            ("self_attn.q_proj", self.hidden, self.hidden),
            ("self_attn.k_proj", self.kv, self.hidden),
            ("self_attn.v_proj", self.kv, self.hidden),
            ("self_attn.o_proj", self.hidden, self.hidden),
            ("mlp.gate_proj", self.ffn, self.hidden),
            ("mlp.up_proj", self.ffn, self.hidden),
            ("mlp.down_proj", self.hidden, self.ffn),
        ]
    }

    /// (name, shape) of every tensor, in the order of the file.
    fn tensors(&self) -> Vec<(String, [usize; 2])> {
        let mut tensors = Vec::new();
        for layer in 0..self.layers {
            for (module, out, input) in self.modules() {
                let name = |matrix: &str| {
                    format!("base_model.model.model.layers.{layer}.{module}.{matrix}.weight")
                };
                tensors.push((name("lora_A"), [self.rank, input]));
                tensors.push((name("lora_B"), [out, self.rank]));
            }
        }
        tensors
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors()
            .iter()
            .map(|(_, [rows, cols])| (rows * cols * 2) as u64)
            .sum()
    }

    /// The base model's `config.json`.
    pub fn model_config(&self) -> String {
        let heads = self.hidden / 64;
        json!({
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv / 64,
            "head_dim": 64,
            "intermediate_size": self.ffn,
            "vocab_size": 128_256,
            "tie_word_embeddings": false,
        })
        .to_string()
    }

    /// The adapter's config.
    fn adapter_config(&self) -> String {
        json!({
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": 2 * self.rank,
            "use_rslora": false,
            "bias": "none",
            "target_modules": self.modules().map(|(module, ..)| module.rsplit('.').next()),
        })
        .to_string()
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` into `dir`. `progress` is told the bytes written since
    /// it was last called.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), CliError> {
        let config = dir.join("adapter_config.json");
        std::fs::write(&config, self.adapter_config()).map_err(|e| CliError::read(&config, e))?;
        let path = dir.join("adapter_model.safetensors");
        self.write_tensors(&path, progress)
            .map_err(|e| CliError::read(&path, e))
    }

    fn write_tensors(&self, path: &Path, progress: &mut dyn FnMut(u64)) -> std::io::Result<()> {
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut offset = 0;
        for (name, [rows, cols]) in self.tensors() {
            let end = offset + rows * cols * 2;
            let entry =
                json!({"dtype": "BF16", "shape": [rows, cols], "data_offsets": [offset, end]});
            header.insert(name, entry);
            offset = end;
        }
        let mut header = serde_json::Value::Object(header).to_string();
        // The format wants the tensors' first byte aligned to eight.
        header.extend(std::iter::repeat_n(
            ' ',
            header.len().next_multiple_of(8) - header.len(),
        ));
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let mut values = RandomBf16::new(1);
        let mut block = vec![0; 1 << 16];
        let mut left = offset;
        while left > 0 {
            let take = left.min(block.len());
            values.fill(&mut block[..take]);
            file.write_all(&block[..take])?;
            progress(take as u64);
            left -= take;
        }
        file.flush()
    }
}

/// BF16 values of size 2^-6 to 2^-5 with random sign and mantissa, so that nothing overflows and nothing is zero.
struct RandomBf16(u64);

impl RandomBf16 {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next value's bits.
    fn next(&mut self) -> u16 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let bits = (self.0 >> 32) as u16;
        // Sign and seven mantissa bits are random, the exponent is that of 2^-6.
        (bits & 0x807F) | ((127 - 6) << 7)
    }

    /// Fills little-endian bytes.
    fn fill(&mut self, bytes: &mut [u8]) {
        for pair in bytes.chunks_exact_mut(2) {
            pair.copy_from_slice(&self.next().to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_8b_takes_335_megabytes() {
        assert_eq!(Shape::LLAMA_8B.tensor_bytes() / 1_000_000, 335);
    }

    #[test]
    fn random_values_are_finite_and_of_one_size() {
        let mut values = RandomBf16::new(3);
        for _ in 0..1000 {
            let value = half::bf16::from_bits(values.next()).to_f32().abs();
            assert!((1.0 / 64.0..1.0 / 32.0).contains(&value), "{value}");
        }
    }
}
