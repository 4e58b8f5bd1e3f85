//! Adapters whose bytes an engine or a source brings by itself, into staging memory, and from there on like every other.

use super::extensions::Extensions;
use super::{LoraWeights, SlotExtension, StagedAdapter};
use crate::device::DevicePtr;
use crate::landing::{accept, plan};
use crate::pack::unit_count;
use crate::{
    AdapterAb, AuditReason, AuditReport, Finding, LandPlace, LandRequest, LandTarget,
    WeightManifest, WeightsError,
};
use half::bf16;
use lora_config::{AdapterConfig, FindingLevel};
use rayon::prelude::*;
use std::error::Error;
use std::sync::Arc;

/// An adapter whose bytes are to land in staging memory.
#[derive(Clone)]
pub struct LandingInput<'a> {
    /// Name to load it under.
    pub name: &'a str,
    /// Where its bytes are in its file.
    pub weights: &'a WeightManifest,
    /// Its parsed config.
    pub config: &'a AdapterConfig,
    extensions: Extensions,
}

impl<'a> LandingInput<'a> {
    /// An adapter without extensions.
    pub fn new(name: &'a str, weights: &'a WeightManifest, config: &'a AdapterConfig) -> Self {
        Self {
            name,
            weights,
            config,
            extensions: Extensions::default(),
        }
    }

    /// With an extension more, installed after those given before.
    #[must_use]
    pub fn with_extension(mut self, extension: Arc<dyn SlotExtension>) -> Self {
        self.extensions.attach(extension);
        self
    }
}

impl LoraWeights {
    /// Stages an adapter whose bytes `land` brings. The header is audited, then `land` gets the copies to make, as
    /// [`build_land_targets`](crate::build_land_targets) plans them with the image at address 0, and the image, zeroed: staging
    /// memory, pinned where the backend has such. It makes every copy and writes nothing else. What has landed is then looked at,
    /// value by value. No slot is touched: a `land` that fails, or brings a NaN, leaves everything as it was.
    ///
    /// # Errors
    /// [`WeightsError::Refused`] by the header before `land` is called, or by the values after it; [`WeightsError::Landing`] where
    /// `land` fails; [`WeightsError::Memory`].
    pub fn stage_landed<F>(
        &self,
        input: &LandingInput<'_>,
        land: F,
    ) -> Result<StagedAdapter, WeightsError>
    where
        F: FnOnce(&[LandTarget], &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>>,
    {
        let _span = tracing::info_span!("lora_stage_landed", adapter = input.name).entered();
        let metrics = &self.shared.metrics;
        let staged = metrics.land.time(|| self.landed(input, land));
        staged.map_err(|error| metrics.refused(error))
    }

    fn landed<F>(&self, input: &LandingInput<'_>, land: F) -> Result<StagedAdapter, WeightsError>
    where
        F: FnOnce(&[LandTarget], &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>>,
    {
        let shared = &self.shared;
        let layout = &shared.layout;
        let mut report = accept(LandRequest {
            name: input.name,
            weights: input.weights,
            config: input.config,
            model: &shared.model,
            pool: &shared.pool,
        })?;
        let bytes = layout.bytes();
        let unit = |n| DevicePtr(bytes.slot + n * bytes.expert_unit);
        let units: Vec<DevicePtr> = (0..unit_count(&report.pairs)).map(unit).collect();
        let place = LandPlace {
            slot: DevicePtr::NULL,
            units: &units,
        };
        let targets = plan(input.weights, &report, layout, place)?;
        let (mut staging, image_bytes) = shared.stage_image(&report.pairs)?;
        let image = &mut staging.bytes_mut()[..image_bytes];
        image.fill(0);
        let landed = land(&targets, image).map_err(|source| WeightsError::Landing {
            adapter: input.name.to_owned(),
            source,
        });
        let checked = landed.and_then(|()| {
            look_at(&targets, image, (input.weights, &mut report));
            if report.ok() {
                return Ok(());
            }
            Err(WeightsError::Refused {
                adapter: input.name.to_owned(),
                report: Box::new(std::mem::take(&mut report)),
            })
        });
        if let Err(error) = checked {
            shared.staging.put(staging);
            return Err(error);
        }
        Ok(StagedAdapter {
            shared: Arc::clone(shared),
            name: input.name.to_owned(),
            config: input.config.clone(),
            report: Arc::new(report),
            image_bytes,
            staging,
            extensions: input.extensions.clone(),
        })
    }
}

/// What the values of a matrix that has landed are.
struct Landed {
    first_bad: Option<(u64, bf16)>,
    any_nonzero: bool,
}

/// Puts what the landed values are into a report that knows the header alone.
fn look_at(
    targets: &[LandTarget],
    image: &[u8],
    (weights, report): (&WeightManifest, &mut AuditReport),
) {
    let landed: Vec<Landed> = targets
        .par_iter()
        .map(|target| values(target, image))
        .collect();
    let unread = AuditReason::ValuesUnread.as_str();
    report.findings.retain(|finding| finding.reason != unread);
    report.values_read = true;
    for (target, landed) in targets.iter().zip(&landed) {
        if let Some((at, value)) = landed.first_bad {
            let matrix = match target.ab {
                AdapterAb::A => "A",
                AdapterAb::B => "B",
            };
            report.findings.push(Finding {
                level: FindingLevel::Error,
                reason: AuditReason::NonFiniteWeights.as_str().to_owned(),
                tensor: Some(weights.tensors()[target.tensor.0].name.clone()),
                message: format!(
                    "value {at} (row-major) of {matrix} of {} has landed as {value}",
                    target.path
                ),
            });
        }
    }
    let is_zero =
        |(target, landed): (&LandTarget, &Landed)| target.ab == AdapterAb::A || !landed.any_nonzero;
    if report.ok() && !targets.is_empty() && targets.iter().zip(&landed).all(is_zero) {
        report.findings.push(Finding {
            level: FindingLevel::Warning,
            reason: AuditReason::NoEffect.as_str().to_owned(),
            tensor: None,
            message: "every B is zero, as before training: the adapter changes nothing".to_owned(),
        });
    }
    report.findings.sort_by_key(|finding| finding.level);
}

fn values(target: &LandTarget, image: &[u8]) -> Landed {
    let mut landed = Landed {
        first_bad: None,
        any_nonzero: false,
    };
    for row in 0..target.rows {
        // Planned inside the image.
        let start = (target.dst.0 + row * target.dst_stride) as usize;
        let (values, _) = image[start..][..target.row_bytes as usize].as_chunks();
        let values = values.iter().map(|value| bf16::from_le_bytes(*value));
        for (column, value) in (0u64..).zip(values) {
            landed.any_nonzero |= value != bf16::ZERO;
            if !value.is_finite() && landed.first_bad.is_none() {
                landed.first_bad = Some((row * (target.row_bytes / 2) + column, value));
            }
        }
    }
    landed
}
