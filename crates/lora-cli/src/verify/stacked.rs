//! Stacked expert parameters: one golden site for each expert and projection.
//!
//! The parameter is recorded before and after PEFT, so the delta is compared as what it does to rows: base is
//! `x * w^T`, wanted is `x * w_adapted^T`. x is the block's recorded input for gate and up. For down there is none, since
//! the activation lies between: seeded rows serve.

use super::golden::{GoldenSite, Tensors, matrix};
use super::matrix::Matrix;
use lora_runtime::config::{GateUpOrder, ModelSpec, MoeSpec, StackedAxes};
use lora_runtime::weights::{ExpertProj, LoraTarget};

/// Sites of the stacked parameter `path`: `[E, out, in]` or `[E, in, out]` as the model stores it.
pub(super) fn sites(
    tensors: &Tensors,
    path: &str,
    spec: &ModelSpec,
) -> Result<Vec<GoldenSite>, String> {
    let moe = spec
        .moe
        .as_ref()
        .ok_or_else(|| format!("{path}: the model has no experts"))?;
    let layer = layer_of(path).ok_or_else(|| format!("{path}: no layer number"))?;
    let (block, parameter) = path
        .rsplit_once('.')
        .ok_or_else(|| format!("{path}: no block"))?;
    let projections: &[ExpertProj] = match parameter {
        "gate_up_proj" => &[ExpertProj::Gate, ExpertProj::Up],
        "down_proj" => &[ExpertProj::Down],
        _ => return Err(format!("{path}: not a stacked expert parameter")),
    };
    let hidden = matrix(tensors, block, "hidden")?;
    let mut found = Vec::new();
    for expert in 0..moe.num_experts {
        for proj in projections {
            let weight = |role: &str| {
                expert_weight(tensors, &format!("{path}|{role}"), expert, (*proj, moe))
            };
            let (before, after) = (weight("w")?, weight("w_adapted")?);
            let x = match proj {
                ExpertProj::Down => seeded_rows(
                    hidden.shape().0,
                    before.shape().1,
                    (layer * moe.num_experts + expert) as u64,
                ),
                _ => hidden.clone(),
            };
            found.push(GoldenSite {
                path: format!("{block}.{expert}.{}", proj.peft_name()),
                layer,
                target: LoraTarget::Expert {
                    n: expert,
                    proj: *proj,
                },
                base: x.times_transposed(&before),
                out: x.times_transposed(&after),
                x,
            });
        }
    }
    Ok(found)
}

/// The `[out, in]` weight of one expert's projection inside the stacked tensor `name`.
pub(super) fn expert_weight(
    tensors: &Tensors,
    name: &str,
    expert: usize,
    proj: (ExpertProj, &MoeSpec),
) -> Result<Matrix, String> {
    let (proj, moe) = proj;
    let (shape, values) = tensors
        .get(name)
        .ok_or_else(|| format!("{name} is missing"))?;
    let [experts, d1, d2] = shape[..] else {
        return Err(format!(
            "{name} has shape {shape:?}, three dimensions are wanted"
        ));
    };
    if expert >= experts {
        return Err(format!(
            "{name} holds {experts} experts, the model has {}",
            moe.num_experts
        ));
    }
    let stored = &values[expert * d1 * d2..][..d1 * d2];
    let (out, width) = match moe.stacked_axes {
        StackedAxes::OutIn => (d1, d2),
        StackedAxes::InOut => (d2, d1),
    };
    let at = |row: usize, col: usize| match moe.stacked_axes {
        StackedAxes::OutIn => stored[row * d2 + col],
        StackedAxes::InOut => stored[col * d2 + row],
    };
    let half = out / 2;
    let rows: Vec<usize> = match (proj, moe.gate_up) {
        (ExpertProj::Down, _) => (0..out).collect(),
        (ExpertProj::Gate, GateUpOrder::Concatenated) => (0..half).collect(),
        (ExpertProj::Up, GateUpOrder::Concatenated) => (half..out).collect(),
        (ExpertProj::Gate, GateUpOrder::Interleaved) => (0..out).step_by(2).collect(),
        (ExpertProj::Up, GateUpOrder::Interleaved) => (1..out).step_by(2).collect(),
    };
    let picked = rows
        .iter()
        .flat_map(|row| (0..width).map(move |col| (*row, col)))
        .map(|(row, col)| at(row, col));
    Ok(Matrix::new(rows.len(), width, picked.collect()))
}

/// The number after `.layers.`.
pub(super) fn layer_of(path: &str) -> Option<usize> {
    path.split_once("layers.")?
        .1
        .split('.')
        .next()?
        .parse()
        .ok()
}

/// Rows of values in -1..1 that depend on `seed` alone (xorshift64*).
fn seeded_rows(rows: usize, cols: usize, seed: u64) -> Matrix {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        (bits as f32 / (1u32 << 23) as f32) - 1.0
    };
    Matrix::new(rows, cols, (0..rows * cols).map(|_| next()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_rows_repeat_and_differ_by_seed() {
        assert_eq!(seeded_rows(3, 5, 7), seeded_rows(3, 5, 7));
        assert_ne!(seeded_rows(3, 5, 7), seeded_rows(3, 5, 8));
        assert!(seeded_rows(10, 10, 0).row(9).iter().all(|v| v.abs() <= 1.0));
    }

    #[test]
    fn layer_number_is_read_from_the_path() {
        assert_eq!(layer_of("model.layers.12.mlp.experts.down_proj"), Some(12));
        assert_eq!(layer_of("model.embed_tokens"), None);
    }
}
