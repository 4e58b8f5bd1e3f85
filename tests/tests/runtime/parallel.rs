//! Tensor parallelism: what a rank's part of a projection takes.

use crate::{bits, matrix, model, rotating};
use lora_runtime::config::{BackendKind, ModelSpec, ParseOptions};
use lora_runtime::kernels::Stream;
use lora_runtime::weights::{AdapterStore, BASE_SLOT, LoraModule, MemoryTensor};
use lora_runtime::{Adapter, LoraRuntime, ModuleOut};

const HIDDEN: usize = 32;
const RANK: usize = 4;
const ROWS: usize = 3;

/// q of layer 0 for rows of one adapter and of the base model, out of a model whose q is `width` wide: row by row.
fn q_of_part(model: ModelSpec, width: usize, b: &[f32], out: &[u16]) -> Vec<Vec<u16>> {
    let lora = LoraRuntime::open(BackendKind::Host, model, rotating()).expect("opens");
    let path = "base_model.model.model.layers.0.self_attn.q_proj";
    let a: Vec<f32> = (0..RANK * HIDDEN).map(|at| (at % 7) as f32 - 3.0).collect();
    let tensors = [
        MemoryTensor::from_f32(format!("{path}.lora_A.weight"), [RANK, HIDDEN], &a),
        MemoryTensor::from_f32(format!("{path}.lora_B.weight"), [width, RANK], b),
    ];
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": false, "target_modules": ["layers.0.self_attn.q_proj"]}"#;
    let store = AdapterStore::from_tensors(config, tensors).expect("tensors hold together");
    let adapter = Adapter::from_store("part", store, &ParseOptions::default()).expect("parses");
    lora.load(&[adapter]).expect("fits the part");

    let mut batch = lora.batch(8).expect("fits");
    let mut scratch = lora.scratch(8).expect("fits");
    lora.route(&mut batch, Stream::OWN, &[0, BASE_SLOT, 0], ROWS)
        .expect("slot 0 is filled");
    let x = matrix(&lora, ROWS, HIDDEN, 1);
    let mut out = lora.buffer(out).expect("memory");
    let q = ModuleOut {
        module: LoraModule::QProj,
        out: out.mat_mut(ROWS, width, width).expect("fits"),
    };
    let mut ctx = lora.context(Stream::OWN, &mut scratch);
    let x = x.mat(ROWS, HIDDEN, HIDDEN).expect("fits");
    lora.apply(&mut ctx, &batch, 0, x, [q]).expect("launches");
    lora.synchronize(Stream::OWN).expect("runs");
    bits(&out, ROWS * width)
        .chunks(width)
        .map(<[u16]>::to_vec)
        .collect()
}

#[test]
fn ranks_with_their_rows_of_b_give_the_bits_of_the_whole() {
    let whole = model("llama_plain");
    let width = whole.q_width();
    let b: Vec<f32> = (0..width * RANK)
        .map(|at| (at % 11) as f32 / 8.0 - 0.5)
        .collect();
    // BF16 bits of small numbers, another one each element.
    let base: Vec<Vec<u16>> = (0..ROWS)
        .map(|row| {
            (0..width)
                .map(|col| 0x3f00 + (row * width + col) as u16)
                .collect()
        })
        .collect();
    let wanted = q_of_part(whole.clone(), width, &b, &base.concat());
    assert_eq!(wanted[1], base[1], "a base row");
    assert_ne!(wanted[0], base[0]);

    for rank in 0..2 {
        let mut part = whole.clone();
        part.heads /= 2;
        part.kv_heads /= 2;
        let own = rank * width / 2..(rank + 1) * width / 2;
        let out: Vec<u16> = base
            .iter()
            .flat_map(|row| &row[own.clone()])
            .copied()
            .collect();
        let rows_of_b = &b[own.start * RANK..own.end * RANK];
        let got = q_of_part(part, width / 2, rows_of_b, &out);
        for (got, wanted) in got.iter().zip(&wanted) {
            assert_eq!(got[..], wanted[own.clone()], "rank {rank}");
        }
    }
}
