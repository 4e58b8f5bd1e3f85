//! Tensors that hold all experts of a layer, as PEFT's `target_parameters` writes them, resolved and split into one pair for each
//! expert and projection.
//!
//! A parameter is `[E, d1, d2]`; its stacked A is `[E * r, dimA]`, its B `[dimB, E * r]`. Four things are not in the
//! tensors' names and are settled here, never guessed:
//! - **which parameter** a tensor adapts: PEFT nests the adapted parameters of a module in the order in which the model
//!   registers them, the first innermost (`experts.base_layer.lora_*`), the last outermost (`experts.lora_*`);
//!   `target_parameters` says which there are;
//! - **what A covers**, `in` or `out`: the shapes, where the two differ; else the epoch that `peft_version` and family give;
//! - **how B's columns lie**: `lora_B_layout`, else PEFT's own order where PEFT's version is given;
//! - **where gate and up are** in a fused output: the model's spec.

use super::AuditReason;
mod epoch;

use super::context::{Context, Findings};
use super::inventory::Halves;
use super::pair::{AuditedPair, OutputRows, PairSource, StackedPair};
use super::pairs::{check_rank_limit, loads, matrix_shape, scaling};
use crate::names::{LayerPath, is_moe_block, moe_of_layer};
use crate::{ExpertProj, LoraTarget, RejectReason, StackedLayout, TensorId};
use lora_config::{AdapterConfig, GateUpOrder, LoraBLayout, ModelSpec, MoeSpec};

/// Where a stacked tensor stands: its layer, and how many `base_layer` are between `experts` and it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level {
    pub(super) layer: usize,
    pub(super) depth: usize,
}

/// A parameter of a module of experts, in the order in which models register them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    GateUp,
    GateUpBias,
    Down,
    DownBias,
}

impl Parameter {
    const REGISTERED: [Self; 4] = [Self::GateUp, Self::GateUpBias, Self::Down, Self::DownBias];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::GateUp => "gate_up_proj",
            Self::GateUpBias => "gate_up_proj_bias",
            Self::Down => "down_proj",
            Self::DownBias => "down_proj_bias",
        }
    }
}

/// The level of `experts` and `experts.base_layer...` on a MoE layer; `None` for every other path.
pub(super) fn level_of(at: &LayerPath<'_>, spec: &ModelSpec) -> Option<Level> {
    moe_of_layer(spec, at.layer)?;
    let (block, inside) = at.rest.split_once('.')?;
    let nested = inside
        .strip_prefix("experts")
        .filter(|_| is_moe_block(block, spec))?;
    let depth = nested.matches(".base_layer").count();
    (nested == ".base_layer".repeat(depth)).then_some(Level {
        layer: at.layer,
        depth,
    })
}

/// Whether the config declares a parameter of the module that `path` (with its `base_layer`s) belongs to. A refused config
/// cannot be asked; the tensors are then taken as declared.
pub(super) fn is_declared(context: Context<'_>, path: &str) -> bool {
    let module = module_of(path);
    context
        .config
        .is_none_or(|config| !declared(config, module).is_empty())
}

/// Path of the experts' module.
pub(super) fn module_of(path: &str) -> &str {
    path.trim_end_matches(".base_layer")
}

/// Parameters of `module` that `target_parameters` names, in the model's order.
pub(super) fn declared(config: &AdapterConfig, module: &str) -> Vec<Parameter> {
    let named =
        |parameter: &Parameter| names_path(config, &format!("{module}.{}", parameter.name()));
    Parameter::REGISTERED.into_iter().filter(named).collect()
}

/// Whether an entry of `target_parameters` is `path` or a dotted suffix of it, which is PEFT's rule.
pub(super) fn names_path(config: &AdapterConfig, path: &str) -> bool {
    config
        .target_parameters()
        .iter()
        .any(|entry| entry_names(entry, path))
}

fn entry_names(entry: &str, path: &str) -> bool {
    path.strip_suffix(entry)
        .is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The pairs of one level; what cannot be settled is a finding.
pub(super) fn split(
    context: Context<'_>,
    level: Level,
    halves: &Halves,
    findings: &mut Findings,
) -> Vec<AuditedPair> {
    let (a, b) = match halves.both() {
        Ok(both) => both,
        Err((half, missing)) => {
            let message = format!("there is no {missing} beside it");
            findings.error(AuditReason::UnpairedTensor, context.name(half), message);
            return Vec::new();
        }
    };
    let shapes = (
        matrix_shape(context, a, findings),
        matrix_shape(context, b, findings),
    );
    let (Some(config), Some(moe)) = (context.config, moe_of_layer(context.spec, level.layer))
    else {
        return Vec::new();
    };
    let module = module_of(&halves.path);
    let Some(parameter) = parameter_at(config, module, level) else {
        let message = format!(
            "target_parameters names {} parameters of `{module}`, none of which this tensor can belong to",
            declared(config, module).len()
        );
        findings.reject(RejectReason::FusedExpertLora, context.name(a), message);
        return Vec::new();
    };
    let (Some(a_shape), Some(b_shape)) = shapes else {
        return Vec::new();
    };
    let stack = Stack {
        context,
        moe,
        a: (a, a_shape),
        b: (b, b_shape),
        parameter,
        path: format!("{module}.{}", parameter.name()),
        layer: level.layer,
    };
    stack.pairs(config, findings).unwrap_or_default()
}

/// The parameter that the tensors of a level adapt: the declared ones nest with the last one outermost.
fn parameter_at(config: &AdapterConfig, module: &str, level: Level) -> Option<Parameter> {
    let declared = declared(config, module);
    let from_last = declared.len().checked_sub(level.depth + 1)?;
    let parameter = declared[from_last];
    matches!(parameter, Parameter::GateUp | Parameter::Down).then_some(parameter)
}

/// One parameter's stacked tensors, on their way to pairs.
struct Stack<'a> {
    context: Context<'a>,
    moe: &'a MoeSpec,
    a: (TensorId, [usize; 2]),
    b: (TensorId, [usize; 2]),
    parameter: Parameter,
    path: String,
    layer: usize,
}

impl Stack<'_> {
    fn pairs(&self, config: &AdapterConfig, findings: &mut Findings) -> Option<Vec<AuditedPair>> {
        let (k_in, n_out) = self.widths();
        let scaled = scaling(self.context, config, &self.path, self.a.0, findings);
        let rank = self.rank(scaled.map(|s| s.rank), findings);
        let layout = self.layout(config, (k_in, n_out), findings);
        let order = self.order(config, rank, findings);
        let (scaled, rank, layout, order) = (scaled?, rank?, layout?, order?);
        let target = LoraTarget::Expert {
            n: 0,
            proj: ExpertProj::Gate,
        };
        let fits = check_rank_limit(self.context, target, (rank, self.a.0), findings);
        if !fits || !loads(self.context, [self.a.0, self.b.0]) {
            return None;
        }
        let experts = self.moe.num_experts;
        let mut pairs = Vec::with_capacity(experts * 2);
        for expert in 0..experts {
            for (proj, rows) in self.projections(n_out) {
                let source = StackedPair {
                    a: self.a.0,
                    b: self.b.0,
                    experts,
                    expert,
                    rank,
                    layout,
                    order,
                    rows,
                };
                pairs.push(AuditedPair {
                    layer: self.layer,
                    target: LoraTarget::Expert { n: expert, proj },
                    path: self.path.clone(),
                    rank: scaled.rank,
                    k_in,
                    n_out: rows.count,
                    scale: scaled.scaling,
                    source: PairSource::Stacked(source),
                });
            }
        }
        Some(pairs)
    }

    /// `(in, out)` of the parameter for one expert.
    fn widths(&self) -> (usize, usize) {
        let hidden = self.context.spec.hidden_size;
        let width = self.moe.expert_width;
        match self.parameter {
            Parameter::GateUp | Parameter::GateUpBias => (hidden, width.saturating_mul(2)),
            Parameter::Down | Parameter::DownBias => (width, hidden),
        }
    }

    /// Which rows of the output each projection has.
    fn projections(&self, n_out: usize) -> Vec<(ExpertProj, OutputRows)> {
        let width = self.moe.expert_width;
        let rows = |start, step, count| OutputRows { start, step, count };
        match (self.parameter, self.moe.gate_up) {
            (Parameter::Down | Parameter::DownBias, _) => {
                vec![(ExpertProj::Down, rows(0, 1, n_out))]
            }
            (_, GateUpOrder::Concatenated) => vec![
                (ExpertProj::Gate, rows(0, 1, width)),
                (ExpertProj::Up, rows(width, 1, width)),
            ],
            (_, GateUpOrder::Interleaved) => vec![
                (ExpertProj::Gate, rows(0, 2, width)),
                (ExpertProj::Up, rows(1, 2, width)),
            ],
        }
    }

    /// The rank of each expert, where A and B hold experts times the config's rank.
    fn rank(&self, declared: Option<u32>, findings: &mut Findings) -> Option<usize> {
        let experts = self.moe.num_experts;
        let mut agreed = true;
        let sides = [(self.a, 0, "rows"), (self.b, 1, "columns")];
        for ((id, shape), axis, what) in sides {
            let stacked = shape[axis];
            let message = match declared {
                _ if stacked % experts != 0 => {
                    format!(
                        "shape {shape:?}: {stacked} {what} are no multiple of {experts} experts"
                    )
                }
                Some(rank) if Some(stacked) != experts.checked_mul(rank as usize) => format!(
                    "shape {shape:?}: {stacked} {what}, and {experts} experts of rank {rank} (the config's for `{}`) have {}",
                    self.path,
                    experts.saturating_mul(rank as usize)
                ),
                _ => continue,
            };
            agreed = false;
            findings.error(
                AuditReason::StackedRankMismatch,
                self.context.name(id),
                message,
            );
        }
        let [from_a, from_b] = sides.map(|((_, shape), axis, _)| shape[axis] / experts);
        if agreed && from_a != from_b {
            let message = format!(
                "rank {from_a} for each expert, and {from_b} in {}",
                self.context.name(self.b.0)
            );
            findings.error(
                AuditReason::StackedRankMismatch,
                self.context.name(self.a.0),
                message,
            );
            agreed = false;
        }
        agreed.then_some(from_a)
    }

    /// What A covers.
    fn layout(
        &self,
        config: &AdapterConfig,
        (k_in, n_out): (usize, usize),
        findings: &mut Findings,
    ) -> Option<StackedLayout> {
        let (dim_a, dim_b) = (self.a.1[1], self.b.1[0]);
        let a_in = (dim_a, dim_b) == (k_in, n_out);
        let a_out = (dim_a, dim_b) == (n_out, k_in);
        match (a_in, a_out) {
            (true, false) => return Some(StackedLayout::AIn),
            (false, true) => return Some(StackedLayout::AOut),
            (false, false) => {
                let message = format!(
                    "A covers {dim_a} and B {dim_b}; `{}` of one expert is {k_in} to {n_out}",
                    self.path
                );
                findings.error(
                    AuditReason::ShapeMismatch,
                    self.context.name(self.a.0),
                    message,
                );
                return None;
            }
            (true, true) => {}
        }
        let epoch = config
            .peft_version()
            .and_then(|v| epoch::layout_of_version(v, self.moe));
        let settled = epoch.or(self.context.pool.policy.stacked_layout);
        if settled.is_none() {
            let message = format!(
                "`{}` is {k_in} to {n_out}, so that shapes do not tell whether A covers its input or its output, and {}; \
                 the option stacked_layout settles it",
                self.path,
                match config.peft_version() {
                    None => "the config has no peft_version".to_owned(),
                    Some(version) => format!("PEFT {version} does not tell either"),
                }
            );
            findings.error(
                AuditReason::StackedLayoutAmbiguous,
                self.context.name(self.a.0),
                message,
            );
        }
        settled
    }

    /// How B's columns lie.
    fn order(
        &self,
        config: &AdapterConfig,
        rank: Option<usize>,
        findings: &mut Findings,
    ) -> Option<LoraBLayout> {
        let same = self.moe.num_experts == 1 || rank == Some(1);
        let by_peft = config.peft_version().is_some() || same;
        let settled = config
            .lora_b_layout()
            .or(by_peft.then_some(LoraBLayout::RankMajor))
            .or(self.context.pool.policy.stacked_order);
        if settled.is_none() {
            let message = "PEFT puts B's columns rank by rank, other writers expert by expert, and the config has neither \
                           peft_version nor lora_B_layout; the option stacked_order settles it";
            findings.error(
                AuditReason::StackedLayoutAmbiguous,
                self.context.name(self.b.0),
                message,
            );
        }
        settled
    }
}
