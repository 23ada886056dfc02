package worker

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Metrics are the counters of a worker. Their labels are the flow's name, and the source, or the bucket that the flow
// looks keys up in, where there is one for each.
type Metrics struct {
	commits, records, results, dead, late, publishes prometheus.Counter
	stateBytes                                       prometheus.Counter
	position, headroom                               *prometheus.GaugeVec
	tableKeys, tableBytes, tableBehind               *prometheus.GaugeVec
	written                                          *prometheus.CounterVec
}

// NewMetrics makes the metrics of a flow and registers them. Registering the same
// ones twice is not an error: the first ones are used.
func NewMetrics(r prometheus.Registerer, flowName string) (*Metrics, error) {
	labels := prometheus.Labels{"flow": flowName}
	var errs []error
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
		if err := r.Register(c); err != nil {
			var again prometheus.AlreadyRegisteredError
			if errors.As(err, &again) {
				if was, ok := again.ExistingCollector.(prometheus.Counter); ok {
					return was
				}
			}
			errs = append(errs, err)
		}
		return c
	}
	gauges := func(label, name, help string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, []string{label})
		if err := r.Register(v); err != nil {
			var again prometheus.AlreadyRegisteredError
			if errors.As(err, &again) {
				if was, ok := again.ExistingCollector.(*prometheus.GaugeVec); ok {
					return was
				}
			}
			errs = append(errs, err)
		}
		return v
	}
	m := &Metrics{
		commits:    counter("natsflow_commits_total", "Commits appended to the task logs."),
		records:    counter("natsflow_records_total", "Records applied by committed entries."),
		results:    counter("natsflow_results_total", "Results in committed entries, dead letters not counted."),
		dead:       counter("natsflow_dead_letters_total", "Dead letters in committed entries."),
		late:       counter("natsflow_late_records_total", "Records applied by committed entries that came after their window was closed."),
		publishes:  counter("natsflow_published_total", "Messages published to sinks and acknowledged."),
		stateBytes: counter("natsflow_state_delta_bytes_total", "Bytes of changed state in committed entries, before compression."),
		position:   gauges("source", "natsflow_source_position_sequence", "Sequence up to which a source is processed, committed and published."),
		headroom: gauges("source", "natsflow_source_limit_headroom_ratio",
			"How far a source is from dropping messages that this worker has not processed: 1 is all of the nearest limit left, or no limit, 0 at the limit."),
		tableKeys:   gauges("bucket", "natsflow_table_keys", "Keys of a bucket that the flow looks keys up in."),
		tableBytes:  gauges("bucket", "natsflow_table_bytes", "Bytes of keys and values of a bucket that the flow looks keys up in, in the memory of this worker."),
		tableBehind: gauges("bucket", "natsflow_table_behind_seconds", "How long this worker has not followed the changes of a bucket that the flow looks keys up in; 0 while it does."),
	}
	m.written = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "natsflow_snapshot_written_bytes_total", Help: "Bytes written to the snapshot bucket, as stored.", ConstLabels: labels,
	}, []string{"kind"})
	if err := r.Register(m.written); err != nil {
		var again prometheus.AlreadyRegisteredError
		if !errors.As(err, &again) {
			errs = append(errs, err)
		} else if was, ok := again.ExistingCollector.(*prometheus.CounterVec); ok {
			m.written = was
		}
	}
	return m, errors.Join(errs...)
}

func (m *Metrics) committed(s flow.Sealed) {
	m.commits.Inc()
	m.records.Add(float64(s.Records))
	m.results.Add(float64(results(s)))
	m.dead.Add(float64(s.DeadLetters))
	m.late.Add(float64(s.Late))
	m.stateBytes.Add(float64(len(s.Delta)))
}

// wrote counts what a log has written since an earlier look at it.
func (m *Metrics) wrote(was, now kvsnap.LogStats) {
	bodies := func(s kvsnap.LogStats) uint64 { return s.DeltaBytes + s.OutboxBytes }
	m.written.WithLabelValues("delta").Add(float64(now.DeltaBytes - was.DeltaBytes))
	m.written.WithLabelValues("outbox").Add(float64(now.OutboxBytes - was.OutboxBytes))
	m.written.WithLabelValues("base").Add(float64(now.BaseBytes - was.BaseBytes))
	// Bodies that were too large for their entries are chunks.
	if headers := float64(now.EntryBytes-was.EntryBytes) - float64(bodies(now)-bodies(was)); headers > 0 {
		m.written.WithLabelValues("header").Add(headers)
	}
}

// table notes how a bucket is that the flow looks keys up in.
func (m *Metrics) table(bucket string, is bus.CopyState, behind time.Duration) {
	m.tableKeys.WithLabelValues(bucket).Set(float64(is.Keys))
	m.tableBytes.WithLabelValues(bucket).Set(float64(is.Bytes))
	m.tableBehind.WithLabelValues(bucket).Set(behind.Seconds())
}

func (m *Metrics) forgetTable(bucket string) {
	for _, v := range []*prometheus.GaugeVec{m.tableKeys, m.tableBytes, m.tableBehind} {
		v.DeleteLabelValues(bucket)
	}
}

func (m *Metrics) published(n int) { m.publishes.Add(float64(n)) }
