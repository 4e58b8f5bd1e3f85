//! Ordinary pairs: dtype, shape, rank, scale.

use super::context::{Context, Findings};
use super::inventory::Halves;
use super::pair::{AuditedPair, PairSource};
use super::{AuditReason, Finding, stacked};
use crate::{LoraTarget, TensorId};
use lora_config::{AdapterConfig, FindingLevel, ModuleScaling, TargetMatch};

/// The pair of two matrices; what is wrong with them is a finding each.
pub(super) fn check(
    context: Context<'_>,
    (layer, target): (usize, LoraTarget),
    halves: &Halves,
    findings: &mut Findings,
) -> Option<AuditedPair> {
    let (n_out, k_in) = target.dims(context.spec, layer)?;
    let a_rank = |shape: [usize; 2]| (shape[1] == k_in).then_some(shape[0]);
    let b_rank = |shape: [usize; 2]| (shape[0] == n_out).then_some(shape[1]);
    let path = scaling_path(context, &halves.path);
    let any = halves.a.or(halves.b)?;
    let scaled = context
        .config
        .and_then(|config| scaling(context, config, &path, any, findings));
    let declared = scaled.map(|scaled| scaled.rank as usize);
    let a = halves.a.and_then(|id| {
        let rank = matrix_shape(context, id, findings).map(a_rank)?;
        report_shape(
            context,
            id,
            rank.is_some(),
            [declared, Some(k_in)],
            findings,
        );
        Some((id, rank?))
    });
    let b = halves.b.and_then(|id| {
        let rank = matrix_shape(context, id, findings).map(b_rank)?;
        report_shape(
            context,
            id,
            rank.is_some(),
            [Some(n_out), declared],
            findings,
        );
        Some((id, rank?))
    });
    if let Err((half, missing)) = halves.both() {
        let message = format!("there is no {missing} beside it");
        findings.error(AuditReason::UnpairedTensor, context.name(half), message);
    }
    let agreed = check_ranks(context, (a, b), (declared, &path), findings);
    let (Some((a, rank)), Some((b, _))) = (a, b) else {
        return None;
    };
    let fits = check_rank_limit(context, target, (rank, a), findings);
    let scaled = scaled.filter(|_| agreed && fits && loads(context, [a, b]))?;
    Some(AuditedPair {
        layer,
        target,
        path,
        rank: scaled.rank,
        k_in,
        n_out,
        scale: scaled.scaling,
        source: PairSource::Whole { a, b },
    })
}

/// Shape of a matrix that has two dimensions, none of them zero. The dtype is looked at too, but does not decide.
pub(super) fn matrix_shape(
    context: Context<'_>,
    id: TensorId,
    findings: &mut Findings,
) -> Option<[usize; 2]> {
    check_dtype(context, id, findings);
    let shape = context.shape(id);
    let name = context.name(id);
    if shape.contains(&0) {
        let message = format!(
            "shape {shape:?}: it holds no value, as after a ZeRO-3 save of a shard; gather the weights and save again"
        );
        findings.error(AuditReason::ZeroRank, name, message);
        return None;
    }
    match *shape {
        [rows, columns] => Some([rows, columns]),
        [_] => {
            let message = format!(
                "shape {shape:?}, and A and B have two dimensions; a flat one is a ZeRO-3 or FSDP shard: gather the weights and save again"
            );
            findings.error(AuditReason::ShapeMismatch, name, message);
            None
        }
        _ => {
            let message = format!(
                "shape {shape:?}: {} dimensions, and A and B have two; convert the adapter to PEFT's format",
                shape.len()
            );
            findings.error(AuditReason::ShapeMismatch, name, message);
            None
        }
    }
}

/// Refuses a dtype that does not load.
pub(super) fn check_dtype(context: Context<'_>, id: TensorId, findings: &mut Findings) {
    let meta = context.tensor(id);
    if !meta.dtype.loads() {
        let message = format!("dtype {}; BF16, F16 and F32 load", meta.dtype);
        findings.error(AuditReason::UnsupportedDtype, &meta.name, message);
    }
}

/// Whether both matrices can be read. [`check_dtype`] has said so where not.
pub(super) fn loads(context: Context<'_>, matrices: [TensorId; 2]) -> bool {
    matrices.iter().all(|&id| context.tensor(id).dtype.loads())
}

/// Reports a shape that is not `wanted` (an unknown rank is shown as `r`).
fn report_shape(
    context: Context<'_>,
    id: TensorId,
    fits: bool,
    wanted: [Option<usize>; 2],
    findings: &mut Findings,
) {
    if fits {
        return;
    }
    let shape = context.shape(id);
    let show = |dim: Option<usize>| dim.map_or("r".to_owned(), |dim| dim.to_string());
    let swapped = |dim: usize, want: Option<usize>| want.is_none_or(|want| want == dim);
    let transposed = swapped(shape[1], wanted[0]) && swapped(shape[0], wanted[1]);
    let hint = if transposed {
        "; it looks transposed, and is not turned around since a square one would not show it"
    } else {
        ""
    };
    let message = format!(
        "shape {shape:?}, and the model asks for [{}, {}]{hint}",
        show(wanted[0]),
        show(wanted[1])
    );
    findings.error(AuditReason::ShapeMismatch, context.name(id), message);
}

type Ranked = Option<(TensorId, usize)>;

/// A, B and the config say one rank.
fn check_ranks(
    context: Context<'_>,
    (a, b): (Ranked, Ranked),
    (declared, path): (Option<usize>, &str),
    findings: &mut Findings,
) -> bool {
    if let (Some((a, a_rank)), Some((b, b_rank))) = (a, b)
        && a_rank != b_rank
    {
        let message = format!("rank {a_rank}, and {b_rank} in {}", context.name(b));
        findings.error(AuditReason::RankMismatch, context.name(a), message);
        return false;
    }
    let (Some((id, rank)), Some(declared)) = (a.or(b), declared) else {
        return true;
    };
    if rank != declared {
        let message = format!(
            "rank {rank} (shape {:?}), and the config gives `{path}` rank {declared}",
            context.shape(id)
        );
        findings.error(AuditReason::RankMismatch, context.name(id), message);
    }
    rank == declared
}

/// The rank fits the pool, or for routers and experts the expert region. One without a region is reported once for all, by
/// the caller.
pub(super) fn check_rank_limit(
    context: Context<'_>,
    target: LoraTarget,
    (rank, tensor): (usize, TensorId),
    findings: &mut Findings,
) -> bool {
    let (limit, reason, what) = match (target, context.pool.experts) {
        (LoraTarget::Attn(_), _) => (
            context.pool.max_rank,
            AuditReason::RankExceedsPool,
            "max_rank",
        ),
        (_, Some(experts)) => (
            experts.max_rank,
            AuditReason::ExpertRankExceedsCap,
            "max_lora_expert_rank",
        ),
        (_, None) => return true,
    };
    if rank <= limit as usize {
        return true;
    }
    let message = format!("rank {rank}, and the pool takes up to {limit}; raise {what}");
    findings.error(reason, context.name(tensor), message);
    false
}

/// Rank, alpha and scale of the module or parameter at `path`; `None`, with a finding, where a pattern cannot be evaluated.
pub(super) fn scaling(
    context: Context<'_>,
    config: &AdapterConfig,
    path: &str,
    tensor: TensorId,
    findings: &mut Findings,
) -> Option<ModuleScaling> {
    let Some((field, key)) = config.undecided_pattern(path) else {
        return Some(config.module(path));
    };
    findings.0.push(Finding {
        level: FindingLevel::Error,
        reason: format!("config-{field}"),
        tensor: Some(context.name(tensor).to_owned()),
        message: format!("the key `{key}` takes too long to match against `{path}`; write the module's name instead"),
    });
    None
}

/// The path that patterns match: the module's, or its weight's where `target_parameters` names that and `target_modules` does
/// not name the module.
fn scaling_path(context: Context<'_>, module: &str) -> String {
    let parameters = |config: &&AdapterConfig| !config.target_parameters().is_empty();
    let Some(config) = context.config.filter(parameters) else {
        return module.to_owned();
    };
    let weight = format!("{module}.weight");
    let by_parameter = stacked::names_path(config, &weight);
    if by_parameter && config.targets(module) != TargetMatch::Yes {
        weight
    } else {
        module.to_owned()
    }
}
