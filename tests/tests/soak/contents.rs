//! Adapters that say who they are, and the record of which identity has which contents.

use half::bf16;
use lora_runtime::Adapter;
use lora_runtime::config::{ModelSpec, ParseOptions};
use lora_runtime::weights::{AdapterStore, MemoryTensor};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Width of x and of out.
pub(crate) const WIDTH: usize = 16;

/// Names that contents come under: more than slots, so that names come back.
pub(crate) const NAMES: u64 = 9;

/// One layer of which the q projection alone is adapted.
pub(crate) fn model() -> ModelSpec {
    ModelSpec::from_hf_config(
        r#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "vocab_size": 16}"#,
    )
    .expect("a small llama")
}

/// The delta on a row whose first x is 1: whole numbers up to 255, which BF16 holds exactly.
pub(crate) type Code = [u8; WIDTH];

/// The code of version `version` of name `name`: both, then digits that depend on both, so that codes differ in most places.
fn code(name: u64, version: u32) -> Code {
    let mut code = [0; WIDTH];
    code[0] = 1 + name as u8;
    code[1..5].copy_from_slice(&version.to_le_bytes());
    let mut mix = (u64::from(version) << 8 | name).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for digit in &mut code[5..] {
        mix ^= mix >> 29;
        mix = mix.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        *digit = (mix >> 56) as u8;
    }
    code
}

/// The record. An identity is a name and a generation, as the prefix cache knows it.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    versions: AtomicU32,
    known: Mutex<HashMap<u64, Known>>,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    code: Code,
    committed: bool,
}

impl Contents {
    /// Fresh contents under the `name`-th name.
    pub(crate) fn make(&self, name: u64) -> (Adapter, Code) {
        let code = code(name, self.versions.fetch_add(1, Ordering::Relaxed));
        let mut a = [bf16::ZERO; WIDTH];
        a[0] = bf16::ONE;
        let b = code.map(|digit| bf16::from_f32(digit.into()));
        let path = "base_model.model.model.layers.0.self_attn.q_proj";
        let tensors = [
            MemoryTensor::from_bf16(format!("{path}.lora_A.weight"), [1, WIDTH], &a),
            MemoryTensor::from_bf16(format!("{path}.lora_B.weight"), [WIDTH, 1], &b),
        ];
        let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_rslora": false, "target_modules": ["q_proj"]}"#;
        let store = AdapterStore::from_tensors(config, tensors).expect("two small tensors");
        let adapter =
            Adapter::from_store(format!("adapter {name}"), store, &ParseOptions::default());
        (adapter.expect("a plain config"), code)
    }

    /// Notes what an identity will have, before anybody can hold it.
    pub(crate) fn expect(&self, id: u64, code: Code) {
        let mut known = self.lock();
        let committed = false;
        if let Some(former) = known.insert(id, Known { code, committed }) {
            assert!(
                !former.committed,
                "identity {id:x} was given to two contents"
            );
        }
    }

    /// The contents became visible.
    pub(crate) fn committed(&self, id: u64) {
        if let Some(known) = self.lock().get_mut(&id) {
            known.committed = true;
        }
    }

    /// What rows of an identity must get.
    pub(crate) fn code(&self, id: u64) -> Option<Code> {
        self.lock().get(&id).map(|known| known.code)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
